#!/usr/bin/env bash
# take_record.sh CHANGES COMMIT: judge the only file that COMMIT adds; CHANGES has a line "status<tab>path" for each file.
# Exit status: that of verify_record.py, 0 accepted, 1 a finding, 2 refused. No text of the commit is shown unescaped.
set -euo pipefail
LC_ALL=C
most=33554432 # bytes
form=$'^added\tdata/measurements/([a-z0-9][a-z0-9.-]{0,150}\\.json)$'

refuse() {
  echo "**refused**: $1"
  exit 2
}

if [[ ! "$1" =~ $form ]]; then
  refuse "A submission is one new file in data/measurements/, named by vramlab share, and nothing else."
fi
path="data/measurements/${BASH_REMATCH[1]}"
if [ -e "$path" ]; then
  refuse "$path is there already."
fi
read -r mode kind _ < <(git ls-tree "$2" -- "$path") || refuse "$path is not in that commit."
if [ "$mode $kind" != "100644 blob" ]; then
  refuse "$path is no plain file."
fi
if [ "$(git cat-file -s "$2:$path")" -gt "$most" ]; then
  refuse "$path is larger than $most bytes."
fi
mkdir -p data/measurements
git cat-file blob "$2:$path" > "$path"
python tests/tools/verify_record.py "$path" || { code=$?; rm "$path"; exit "$code"; }
