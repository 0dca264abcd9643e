#!/usr/bin/env bash
# take_record.sh "PATHS" COMMIT: judge the only file that COMMIT adds; exit status 0 when it may be merged as it is.
set -euo pipefail
if [[ ! "$1" =~ ^data/measurements/[a-z0-9.-]+\.json$ ]]; then
  echo "A submission is one new file in data/measurements/, named by \`vramlab share\`. Here it is: $1"
  exit 2
fi
if [ -e "$1" ]; then
  echo "$1 is there already."
  exit 2
fi
mkdir -p data/measurements
git show "$2:$1" > "$1"
python tests/tools/verify_record.py "$1" || { code=$?; rm "$1"; exit "$code"; }
