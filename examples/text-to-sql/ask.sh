#!/usr/bin/env bash
# Serves the trained model for a moment, and asks it one question with curl. Usage: ask.sh RUN
set -euo pipefail
run=$1
ready=$(mktemp)
"${SPOTUNE:-spotune}" serve "$run" --port 0 --output json > "$ready" &
server=$!
trap 'kill -INT $server 2> /dev/null || true; wait $server || true; rm -f "$ready"' EXIT
until [ -s "$ready" ]; do
  kill -0 $server # ends this script when the server has failed
  sleep 0.2
done
url=$(sed -E 's/.*"url": "([^"]+)".*/\1/' "$ready")
row='{"row": {"question": "Which ferry is the one captained by Ada Lindberg?", "columns": "ferry captain speed year"}}'
echo "curl $url/v1/predict -H 'Content-Type: application/json' -d '$row'"
curl --silent --show-error --fail "$url/v1/predict" --header 'Content-Type: application/json' --data "$row"
echo
