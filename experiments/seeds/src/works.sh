#!/bin/sh
# Runs in the first VM: starts each program of $WORKS in all VMs, one after the other.
set -eu
number=0
total=$(echo "$WORKS" | wc -w)

# measure WORK COMMAND...
measure() {
    echo "$number/$total $1" >"$PERIGEE_PROGRESS"
    number=$((number + 1))
    work=$1
    shift
    mpirun -x PERIGEE_OUTPUT sh /job/inputs/rank.sh "$work" "$@" >"$PERIGEE_OUTPUT/$work-found"
}

# HPA and PFP have a copy each, so that neither finds in a cache what the other one has read.
for work in $WORKS; do
    case $work in
    hpa | pfp) measure "$work" python3 "/job/inputs/$work.py" "/mine/transactions-$work" --support "$SUPPORT" ;;
    blast) measure blast python3 /job/inputs/blast.py /mine/database.fa /mine/queries.fa ;;
    tpch) measure tpch sh /job/inputs/query.sh ;;
    esac
done
echo "$total/$total done" >"$PERIGEE_PROGRESS"
