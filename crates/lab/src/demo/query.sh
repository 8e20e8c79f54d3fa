#!/bin/sh
# Runs in the guest: starts the database of the data volume and asks it the queries, one after the other.
set -eu
progress() { echo "$1" >"$PERIGEE_PROGRESS"; }
as_postgres() { runuser -u postgres -- "$@"; }
bin=/usr/lib/postgresql/15/bin
queries=$(cat inputs/queries)
total=$(echo "$queries" | wc -w)
answers=$PERIGEE_OUTPUT/answers.txt

progress "0/$total start"
$bin/postgres --version >"$PERIGEE_OUTPUT/postgres.version"
uname -r >"$PERIGEE_OUTPUT/kernel.version"
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 300 -l /tmp/postgres.log start || {
    cat /tmp/postgres.log >&2
    exit 1
}

done=0
for query in $queries; do
    progress "$done/$total $query"
    # Each query finds the cache cold, as it would over a database that is larger than the memory.
    echo 3 >/proc/sys/vm/drop_caches
    began=$(cut -d' ' -f1 /proc/uptime)
    echo "-- $query" >>"$answers"
    as_postgres psql -X -q -At -P null=NULL -v ON_ERROR_STOP=1 -f "$PWD/inputs/$query.sql" >>"$answers"
    echo "$query: from $began to $(cut -d' ' -f1 /proc/uptime) s after boot"
    done=$((done + 1))
done
progress "$done/$total done"
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 60 -m immediate stop
