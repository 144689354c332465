#!/bin/sh
# Starts the broker: an ACL file with the SHA-256 of VALKEY_PASSWORD, then the server. Options go to the server.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
data=${VALKEY_DATA:-/data}
: "${VALKEY_PASSWORD:?VALKEY_PASSWORD is not set; write one into .env (see .env.example)}"
umask 077
digest=$(printf %s "$VALKEY_PASSWORD" | sha256sum | cut -c1-64)
sed "s/@DIGEST@/$digest/" "$here/users.acl" > "$data/users.acl"
unset VALKEY_PASSWORD
exec valkey-server "$here/valkey.conf" --dir "$data" --aclfile "$data/users.acl" "$@"
