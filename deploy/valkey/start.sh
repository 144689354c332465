#!/bin/sh
# Starts the broker: an ACL file with the SHA-256 of VALKEY_PASSWORD, then the server. Options go to the server.
# VALKEY_PASSWORD_OLD, where it is set, is taken beside it: while the fleet goes over to a new password.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
data=${VALKEY_DATA:-/data}
: "${VALKEY_PASSWORD:?VALKEY_PASSWORD is not set; write one into .env (see .env.example)}"
umask 077
digest=$(printf %s "$VALKEY_PASSWORD" | sha256sum | cut -c1-64)
former=
if [ -n "${VALKEY_PASSWORD_OLD:-}" ]; then
    former=" #$(printf %s "$VALKEY_PASSWORD_OLD" | sha256sum | cut -c1-64)"
fi
sed "s/@DIGEST@/$digest$former/" "$here/users.acl" > "$data/users.acl.new"
# Users that were added (gpuflow broker-users line, gpuflow workers create) stay.
if [ -f "$data/users.acl" ]; then
    grep -v -e '^user default ' -e '^user gpuflow ' "$data/users.acl" >> "$data/users.acl.new" || true
fi
mv "$data/users.acl.new" "$data/users.acl"
unset VALKEY_PASSWORD VALKEY_PASSWORD_OLD
exec valkey-server "$here/valkey.conf" --dir "$data" --aclfile "$data/users.acl" "$@"
