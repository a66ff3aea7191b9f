#!/bin/bash
# Train short, test long: trains a small model with each position method at 128 tokens, and measures
# its perplexity up to eight times that length, in windows that do not overlap and in sliding ones.
#   bash pretrain/recipes/extrapolation.sh causal "wikitext:wiki.train.tokens" "wikitext:wiki.valid.tokens" runs/long
# The first word is causal or masked; then come the text, the text for validation, and a folder, which
# gets a table (.csv) and a figure (.png) for each way to measure. Further words change the recipe,
# as in training.steps=2000. The same command continues where it was interrupted.
set -euo pipefail

kind=${1:?causal or masked} text=${2:?text to train on} valid=${3:?text for validation}
folder=${4:?folder for everything that is made}
case $kind in
    causal) methods=(causal-sinusoidal causal-rotary causal-t5-bias causal-alibi) ;;
    masked) methods=(baseline sinusoidal alibi) ;;
    *) echo "$kind: accepted: causal or masked" >&2; exit 2 ;;
esac
lengths=128,136,160,192,256,384,512,768,1024

[ -e "$folder/vocabulary" ] ||
    zeroclap train-tokenizer --input "$text" --vocab-size 4096 --output "$folder/vocabulary"
[ -e "$folder/corpus/manifest.json" ] ||
    zeroclap prepare --input "$text" --valid-input "$valid" --tokenizer "$folder/vocabulary" \
        --output "$folder/corpus"
for method in "${methods[@]}"; do
    zeroclap supervise "extrapolation-$kind" "model.variant=$method" "data.corpus=$folder/corpus" \
        "folder=$folder/runs/$method" "${@:5}"
    [ -e "$folder/models/$method" ] ||
        zeroclap export "$folder/runs/$method" --output "$folder/models/$method"
done

measure() {  # NAME OPTION...: into NAME.csv and NAME.png
    zeroclap evaluate "${methods[@]/#/$folder/models/}" --data "$folder/corpus" \
        --csv "$folder/$1.csv" --plot "$folder/$1.png" "${@:2}"
}
if [ "$kind" = causal ]; then
    measure lengths --lengths "$lengths" --interpolate --blocks 12
    # Each window scores its last 64 tokens alone, so that a longer window is more context and no more.
    measure sliding --lengths 128,256,512,1024 --stride 64 --blocks 4
else
    # The learned positions end at 128: longer inputs are refused, and the others are measured.
    measure lengths --lengths 128,160,192,256,384,512 --interpolate --blocks 24 || [ $? -eq 2 ]
fi
echo "tables and figures: $folder/*.csv, $folder/*.png"
