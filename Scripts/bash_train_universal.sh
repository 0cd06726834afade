#!/usr/bin/env bash
# Rebuild the network of --model universal: synthetic anatomies, two stages of training, one .safetensors file.
#
#   bash Scripts/bash_train_universal.sh [--folder F] [--count N] [--size N] [--seed S] [--workers N] [--first-epochs N]
#                                        [--second-epochs N] [--into F] [--print] [-- options of every training]
#
# --folder F          where everything goes, data included (default Models/universal)
# --count N           anatomies, with four views each (default 200)
# --size N            voxels along each side of an anatomy (default 80)
# --seed S            seed of the anatomies (default 0)
# --workers N         processes that write and prepare them (default: one per core)
# --first-epochs N    epochs on pairs of one contrast (default 2; 770 steps each with 200 anatomies)
# --second-epochs N   epochs on any contrast (default 6)
# --into F            the finished file (default Inference/universal.safetensors, which --model universal reads)
# --print             print the commands and run none
# --help              this text
# --                  the rest goes to preparation and training, e.g. -- --set run.device=cuda --set data.batchsize=4
#
# Takes 80 minutes on a CPU core with AVX-512. You can stop it at any time; the same command resumes it. Each command
# line is printed before it runs. Writing the file needs a package: pip install -r requirements-export.txt.
# tests/bench/bench_universal.py shows whether the network is good enough to ship.
#
# PYTHON=path     the interpreter (default: .venv/bin/python, else python3)
#
# Exit code: 0 done, 43 this command cannot run, else that of the command that failed.
set -u
unset CDPATH PYTHONSAFEPATH  # a user's: cd would go elsewhere, and Python would not find our modules
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stop() { echo "error: $1" >&2; exit 43; }

folder=$root/Models/universal
into=$root/Inference/universal.safetensors
count=200 size=80 seed=0 first_epochs=2 second_epochs=6 only_print="" options=()
workers=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)  # a Mac has no nproc, no realpath -m and no stat -c
while (($#)); do
    case $1 in
        --help) sed -n '2,/^set -u/{/^set -u/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --print) only_print=yes ;;
        --) shift; options=("$@"); break ;;
        --folder | --count | --size | --seed | --workers | --first-epochs | --second-epochs | --into)
            [[ -n ${2:-} ]] || stop "$1 needs a value."
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift ;;
        *) stop "$1 is unknown; see bash Scripts/bash_train_universal.sh --help." ;;
    esac
    shift
done
[[ $folder == /* ]] || folder=$PWD/$folder
[[ $into == /* ]] || into=$PWD/$into
for number in "$count" "$size" "$workers" "$first_epochs" "$second_epochs"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || stop "$number: counts, sizes, workers and epochs are whole numbers of at least 1."
done
# shellcheck source=/dev/null
source "$root/Scripts/settings.sh"
choose_python "$root"
config=(--config "$root/Config/config_universal.yaml")

child=""
# shellcheck disable=SC2317,SC2329  # called by the trap
leave() {  # the command that runs saves what it has, and so does the script
    [[ -n $child ]] && kill -TERM "$child" 2> /dev/null && wait "$child"
    exit 130
}
trap leave INT TERM
run() {  # a command: print it, run it, and end the script if it fails; the same command of the script resumes there
    local code=42
    printf '+ %q' "$1"
    printf ' %q' "${@:2}"
    echo
    [[ -n $only_print ]] && return
    while ((code == 42)); do  # a planned restart of a training: once more
        "$@" &
        child=$!
        wait "$child"
        code=$?
        child=""
    done
    ((code == 0)) && return
    echo "error: this ended with exit code $code; run the same command of this script again, it goes on." >&2
    exit "$code"
}
training() { run "${INTERPRETER[@]}" "$root/OM_train_3modes.py" "${config[@]}" "${keys[@]}" "$@"; }
begun() { compgen -G "$1/*.pth" > /dev/null || compgen -G "$1/tmp/*.pth" > /dev/null; }

if [[ -z $only_print ]] && ! "${INTERPRETER[@]}" -c "import safetensors" 2> /dev/null; then
    stop "the file is written by a package that is missing, and hours of training come before: pip install safetensors."
fi

# 1. Anatomies and their views, with labels; and all of them on the training grid.
run "${INTERPRETER[@]}" "$root/Scripts/make_anatomies.py" "${config[@]}" --out "$folder/anatomies" --count "$count" \
    --size "$size" --seed "$seed" --workers "$workers"
keys=(--set data.root="$folder/anatomies" --set data.cache="$folder/cache" --set data.expect_samples=$((2 * count))
      ${options[@]+"${options[@]}"})
run "${INTERPRETER[@]}" "$root/OM_prepare.py" "${config[@]}" "${keys[@]}" --set run.logs="$folder/Logs" \
    --workers "$workers"

# 2. The first stage: mode 3 by local correlation and the Dice of the labels, on views of one contrast.
training --set run.models="$folder/first" --set run.logs="$folder/Logs/first" --set run.epochs="$first_epochs"

# 3. The second stage, from the best checkpoint of the first: the network sees both views of a pair through random
# functions of their intensities, and the losses compare the views as they are, in one contrast.
start=(--init-from "$folder/first/universal_om_net/<the best checkpoint>")
if [[ -z $only_print ]]; then
    start=()
    # A stage that has begun resumes by itself and refuses --init-from.
    if ! begun "$folder/second/universal_om_net"; then
        best=$(cd "$root" && "${INTERPRETER[@]}" -c "import sys; from Inference.load_model import find_checkpoint
print(find_checkpoint(sys.argv[1]))" "$folder/first/universal_om_net") || exit 1
        start=(--init-from "$best")
    fi
fi
training --set run.models="$folder/second" --set run.logs="$folder/Logs/second" --set run.epochs="$second_epochs" \
    --set augment.remap=0.8 ${start[@]+"${start[@]}"}

# 4. One file, and where --model universal looks for it.
run rm -rf "$folder/export"
run "${INTERPRETER[@]}" "$root/OM_export.py" --model "$folder/second/universal_om_net" \
    --out "$folder/export" --licence Apache-2.0
made=$folder/export/model.safetensors
if [[ -z $only_print ]]; then
    bytes=$(wc -c < "$made")
    ((bytes <= 20000000)) || stop "$made has $bytes bytes, and a file of the repository has at most 20 MB."
fi
run mkdir -p "$(dirname "$into")"
run cp "$made" "$into"
run cp "$folder/export/README.md" "${into%.safetensors}.md"
[[ -n $only_print ]] || echo "$into: now --model universal, where it lies in Inference; tests/bench/bench_universal.py says how good it is."
