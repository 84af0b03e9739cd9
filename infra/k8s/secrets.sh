#!/bin/sh
# Makes the Secrets of a run, and of broker and store, from the directory that `packtrain secrets` wrote. Again: brings them up to date.
#   infra/k8s/secrets.sh [-n NAMESPACE] [DIRECTORY]      defaults: packtrain, .secrets
# KUBECTL names another kubectl. With RENDER=1 it prints the manifests, which are secret, and asks no cluster.
set -eu
namespace=packtrain
if [ "${1:-}" = -n ]; then namespace=$2; shift 2; fi
directory=${1:-.secrets}
servers=packtrain-servers
kubectl=${KUBECTL:-kubectl}
[ -r "$directory/run-key" ] || { echo "secrets.sh: $directory has no run-key; run 'make secrets' first" >&2; exit 1; }

secret() {  # namespace, name, then key=file ...
  where=$1 name=$2; shift 2
  for pair; do set -- "$@" "--from-file=$pair"; shift; done
  made=$("$kubectl" create secret generic "$name" --namespace "$where" --dry-run=client -o yaml "$@")
  if [ -n "${RENDER:-}" ]; then
    printf '%s\n---\n' "$made"
  else  # on the server's side, or the values would once more be in an annotation
    printf '%s\n' "$made" | "$kubectl" apply --server-side --force-conflicts -f -
  fi
}

# A pod has its kind's Secret at /run/secrets and no other's. `packtrain-launcher` is for the Job that begins the run.
for kind in dispatcher agent-loop harness grader teacher sampler hook packer trainer engine collector dashboard launcher; do
  set -- "broker=$directory/broker/$kind.nk" "store=$directory/store/$kind.json" "ca=$directory/tls/ca.pem"
  case $kind in agent-loop | harness) set -- "$@" "run-key=$directory/run-key" ;; esac
  case $kind in agent-loop | engine) set -- "$@" "engine-token=$directory/engine-token" ;; esac
  secret "$namespace" "packtrain-$kind" "$@"
done
secret $servers nats-users "users.conf=$directory/broker/users.conf"
secret $servers nats-tls "ca.crt=$directory/tls/ca.pem" "tls.crt=$directory/tls/server.pem" "tls.key=$directory/tls/server-key.pem"
secret $servers store-users "seaweedfs_s3_config=$directory/store/s3.json"
