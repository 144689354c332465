#!/bin/sh
# Builds the image of the preset `loading-worker`. ENGINE=podman uses Podman.
set -eu
cd "$(dirname "$0")"
exec "${ENGINE:-docker}" build -t "${IMAGE:-loading-worker:latest}" .
