#!/bin/sh
# Gives a MinIO server the users of .secrets/store, each with its policy. Needs `mc` with an alias of an administrator, and
# `packtrain`. Run it again after a change of keys or policies.
#
#   infra/store/minio-users.sh ALIAS CONFIG [SECRETS]     CONFIG: the run's file, whose store.url names bucket and prefix
set -eu
alias=$1 config=$2 secrets=${3:-.secrets}
for file in "$secrets"/store/*.json; do
  kind=$(basename "$file" .json)
  [ "$kind" = s3 ] && continue
  policy=$(mktemp)
  packtrain store policy "$kind" --config "$config" --every-run >"$policy"
  # The keys go by standard input: a command line is everybody's to read.
  python3 -c 'import json, sys; keys = json.load(open(sys.argv[1])); print(keys["access_key"], keys["secret_key"], sep="\n")' "$file" |
    mc admin user add "$alias"
  # MinIO takes no policy without statements; who has none is refused everything.
  if grep -q '"Effect"' "$policy"; then
    access=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["access_key"])' "$file")
    mc admin policy create "$alias" "packtrain-$kind" "$policy"
    # Refused when it is attached already: what the user has is shown.
    mc admin policy attach "$alias" "packtrain-$kind" --user "$access" || mc admin user info "$alias" "$access"
  fi
  rm -f "$policy"
done
