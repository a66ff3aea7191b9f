#!/usr/bin/env bash
# From raw text to a GLUE score, with an interruption on the way: about three minutes on two cores.
#
#   tests/walks/journey.sh 'text/*.jsonl.zst' GLUE journey
#
# The text is any that `zeroclap prepare` reads, GLUE is the benchmark's folder (CoLA is used), and
# the last argument is a new folder for everything that the journey makes.
set -euo pipefail
text=$1 glue=$(realpath "$2") folder=$3
mkdir "$folder"

echo "== 1. our own vocabulary, and the text as indexed binaries: nothing is dropped"
zeroclap train-tokenizer --input "$text" --vocab-size 4000 --output "$folder/vocabulary"
zeroclap prepare --input "$text" --tokenizer "$folder/vocabulary" --output "$folder/corpus" \
    --workers 2 --valid-fraction 0.02
cd "$folder"
run=$PWD/runs/mine
zeroclap inspect corpus

echo "== 2. our own recipe"
cat > mine.yaml <<'RECIPE'
extends: small
data: {corpus: corpus}
model: {variant: learned-clap}
training: {steps: 150, evaluation_interval: 50}
RECIPE
zeroclap show mine.yaml
zeroclap plan mine.yaml --gpus 1

echo "== 3. train; a rank is killed on the way, and the run continues by itself"
zeroclap supervise mine.yaml folder="$run" &
supervisor=$!
until [ -d "$run/checkpoints/step-00000100" ]; do
    sleep 1
    kill -0 $supervisor
done
pkill -KILL -f "pretrain.train --local_rank=0 $run"
wait $supervisor
zeroclap status "$run"

echo "== 4. more steps than the recipe said, interrupted and resumed"
longer=(folder="$run" training.steps=200 schedule.decay_steps=150)
zeroclap supervise mine.yaml "${longer[@]}" &
supervisor=$!
sleep 12
kill -TERM $supervisor || true # unless it has finished already
wait $supervisor || [ $? -eq 76 ] # 76: stopped on request
zeroclap supervise mine.yaml "${longer[@]}"
zeroclap audit "$run"

echo "== 5. the model: perplexity by length, for transformers, and a word for a mask"
zeroclap export "$run" --output model
zeroclap evaluate model --data corpus --lengths 32,64,128
zeroclap fill-mask model "He was born in <mask>."
zeroclap convert model --to huggingface --output exported
python - <<'PYTHON'
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("exported")
model = AutoModelForMaskedLM.from_pretrained("exported", trust_remote_code=True)
print(model(**tokenizer("He was born in <mask>.", return_tensors="pt")).logits.shape)
PYTHON

echo "== 6. a GLUE task, and the report"
zeroclap glue model --data "$glue" --tasks cola --seeds 1-2 --output scores \
    learning_rate=3e-4 max_train_examples=600 epochs=2
zeroclap glue-report scores
zeroclap status "$run" --report
