# Computes in LOOPS loops beside each other, of ROUNDS rounds each, and says how many milliseconds that took.
set -e
began=$(date +%s%N)
loops=$LOOPS
while [ "$loops" -gt 0 ]; do
  awk -v "rounds=$ROUNDS" 'BEGIN { for (i = 0; i < rounds; i++) x += i * i; exit (x < 0) }' &
  loops=$((loops - 1))
done
wait
echo "$((($(date +%s%N) - began) / 1000000))" >/output/took_ms
