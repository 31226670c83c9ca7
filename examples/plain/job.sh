#!/bin/sh
# A job that imports nothing: it reads who it is and why it was restarted from its environment and the events file, is asked to
# leave by SIGTERM, and keeps its checkpoints apart by generation. Each rank counts to $STEPS.
set -eu

rank=${RANK:-0}
generation=${GANGLINE_GENERATION:-0}
directory=${GANGLINE_CHECKPOINT_DIR:-./checkpoints}
steps=${STEPS:-60}
leave=
trap 'leave=yes' TERM
mkdir -p "$directory"

# Generations come first in the names. An older generation that still writes somewhere writes to its own file, and nobody reads that:
# the newest generation's file is the last in the order of the names.
step=0
for file in "$directory/rank-$rank".generation-*; do
    if [ -e "$file" ]; then step=$(cat "$file"); fi
done
mine=$directory/rank-$rank.generation-$(printf %08d "$generation")

echo "rank $rank of ${WORLD_SIZE:-1} on ${GANGLINE_NODE:-this machine}, generation $generation, starts at step $step"
if [ -n "${GANGLINE_RESTART_CAUSE:-}" ]; then
    message=$(grep '"event": *"restart"' "${GANGLINE_EVENTS:-/dev/null}" | sed -n 's/.*"message": *"\([^"]*\)".*/\1/p' | tail -n 1)
    echo "restarted ${GANGLINE_RESTARTS:-?} times, this time because of $GANGLINE_RESTART_CAUSE: ${message:-no message}"
fi

save() {
    echo "$step" >"$directory/.rank-$rank.$$"
    mv "$directory/.rank-$rank.$$" "$mine" # in one move: the file is whole at any moment
}

while [ "$step" -lt "$steps" ]; do
    sleep "${STEP_SECONDS:-1}" &
    wait $! || true # ends early when the signal comes
    if [ -n "$leave" ]; then
        save
        echo "rank $rank leaves at step $step"
        exit 143 # not done
    fi
    step=$((step + 1))
    save
done
echo "rank $rank is done at step $step"
