#!/bin/bash
# Train short, test long: trains a small model with each position method at 128 tokens, and measures
# its perplexity on longer inputs.
#   bash pretrain/recipes/extrapolation.sh causal "wikitext:wiki.train.tokens" "wikitext:wiki.valid.tokens" runs/long
# The first word is causal (up to 1024 tokens, also in sliding windows) or masked (up to 512); then come
# the text, the text to measure on, and a folder, which gets a table (.csv) and a figure (.png) for each
# way to measure. Further words change the recipe, as in training.steps=2000. The same command
# continues where it was interrupted.
set -euo pipefail

kind=${1:?causal or masked} text=${2:?text to train on} valid=${3:?text to measure on}
folder=${4:?folder for everything that is made}
case $kind in
    causal) methods=(causal-sinusoidal causal-rotary causal-t5-bias causal-alibi) ;;
    masked) methods=(baseline sinusoidal alibi) ;;
    *) echo "$kind: accepted: causal or masked" >&2; exit 2 ;;
esac
mkdir -p "$folder"
words="$*"
if [ -e "$folder/words" ] && [ "$words" != "$(cat "$folder/words")" ]; then
    echo "$folder: was made with other words; name another folder, or: $(cat "$folder/words")" >&2
    exit 2
fi
printf %s "$words" > "$folder/words"

zeroclap train-tokenizer --input "$text" --vocab-size 4096 --output "$folder/vocabulary"
zeroclap prepare --input "$text" --valid-input "$valid" --tokenizer "$folder/vocabulary" \
    --output "$folder/corpus"
for method in "${methods[@]}"; do
    zeroclap supervise "extrapolation-$kind" "model.variant=$method" "data.corpus=$folder/corpus" \
        "folder=$folder/runs/$method" "${@:5}"
    [ -e "$folder/models/$method" ] ||
        zeroclap export "$folder/runs/$method" --output "$folder/models/$method"
done

documents() {  # TOKENS: how many documents of the validation split hold about so many tokens
    python -P - "$folder/corpus" "$1" <<'END'
import sys
from pathlib import Path
from data_prep.corpus import Corpus
lengths = Corpus(Path(sys.argv[1]), "valid").lengths
print(min(len(lengths), -(-int(sys.argv[2]) * len(lengths) // int(lengths.sum()))))
END
}
measure() {  # NAME OPTION...: into NAME.csv and NAME.png
    rm -f "$folder/$1.csv" "$folder/$1.png"
    zeroclap evaluate "${methods[@]/#/$folder/models/}" --data "$folder/corpus" \
        --csv "$folder/$1.csv" --plot "$folder/$1.png" "${@:2}"
}
if [ "$kind" = causal ]; then
    measure lengths --lengths 128,136,160,192,256,384,512,768,1024 --interpolate \
        --blocks "$(documents 50000)"
    # Each window scores its last 64 tokens alone, so that a longer window is more context and no more.
    measure sliding --lengths 128,256,512,1024 --stride 64 --blocks "$(documents 20000)"
else
    # The learned positions end at 128: longer inputs are refused (exit code 2), the rest is measured.
    measure lengths --lengths 128,160,192,256,384,512 --interpolate --blocks "$(documents 100000)" ||
        grep -q "^alibi,128,512,512,all," "$folder/lengths.csv"
fi
echo "tables and figures: $folder/*.csv, $folder/*.png"
