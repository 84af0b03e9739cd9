#!/bin/sh
# Gives a MinIO server the users of `packtrain secrets`, each with what .secrets/store/s3.json lets it do. Needs python3, and `mc` with an
# alias of an administrator. Run it again after a change of keys or runs.
#
#   infra/store/minio-users.sh ALIAS [SECRETS]
set -eu
alias=${1:?"ALIAS: what mc calls the server"} users=${2:-.secrets}/store/s3.json
policy=$(mktemp)
trap 'rm -f "$policy"' EXIT

# kinds: of users; keys, access, policy KIND: one thing of a user. Its policies are one document here, so that one that it no longer has goes.
tell() {
  python3 - "$users" "$@" <<'END'
import json, sys
file, what, *kind = sys.argv[1:]
known = json.load(open(file))
users = {user["name"]: user for user in known["identities"]}
documents = {each["name"]: json.loads(each["content"]) for each in known["policies"]}
if what == "kinds":
    print(*users)
    sys.exit()
user = users[kind[0]]
keys = user["credentials"][0]
if what == "keys":
    print(keys["accessKey"], keys["secretKey"], sep="\n")
elif what == "access":
    print(keys["accessKey"])
elif user["policyNames"]:
    statements = [each for name in user["policyNames"] for each in documents[name]["Statement"]]
    for number, each in enumerate(statements):
        each["Sid"] += str(number)
    print(json.dumps({"Version": "2012-10-17", "Statement": statements}))
END
}

kinds=$(tell kinds)
for kind in $kinds; do
  # The keys go by standard input: a command line is everybody's to read.
  tell keys "$kind" | mc admin user add "$alias"
  tell policy "$kind" >"$policy"
  # MinIO takes no policy without statements; who has none is refused everything.
  if [ -s "$policy" ]; then
    access=$(tell access "$kind")
    mc admin policy create "$alias" "packtrain-policy-$kind" "$policy"
    # Refused when it is attached already: what the user has is looked at.
    mc admin policy attach "$alias" "packtrain-policy-$kind" --user "$access" || mc admin user info "$alias" "$access" | grep -F "packtrain-policy-$kind"
  fi
done
