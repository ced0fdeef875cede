#!/bin/bash
# Checks, builds and tests the Python SDK against a daemon on gVisor, as root:
#   scripts/sdk-python.sh [ARGUMENTS OF pytest…]
# The tools come from PyPI through the host's pip configuration, and the image from
# the host's Debian archives; both are kept in the cache. Needs the programs in build/.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

sdk=$repo/sdk/python
work=$build/sdk-python
python=$(command -v python3) || die "python3 is missing: scripts/packages.sh installs it"
# Nothing is left beside the sources.
export PYTHONDONTWRITEBYTECODE=1 RUFF_CACHE_DIR=$work/ruff MYPY_CACHE_DIR=$work/mypy

hash_of() { sha256sum | cut -c1-16; }

# keep_one FOLDER: forgets what was kept beside it and not used for three days.
keep_one() {
	touch "$1"
	find "$(dirname "$1")" -mindepth 1 -maxdepth 1 -mtime +3 -exec rm -rf {} +
}

make_venv() {
	venv=$cache/venvs/sdk-python-$({ "$python" --version; readlink -f "$python"; cat "$sdk/requirements-test.txt"; } | hash_of)
	mkdir -p "$cache/venvs"
	(
		# Another run may be making it.
		flock 9
		[ -e "$venv/complete" ] && exit
		rm -rf "$venv"
		echo "sdk-python: installing test tools (once)" >&2
		"$python" -m venv "$venv" || die "venv does not work: scripts/packages.sh installs python3-venv"
		"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$sdk/requirements-test.txt"
		touch "$venv/complete"
	) 9>"$cache/venvs.lock"
	keep_one "$venv"
}

# The sources of the builder are in the name: another builder makes another image.
make_image() {
	images=$cache/sdk-images/$(cat internal/storage/image/debian/*.go internal/storage/image/build.go internal/storage/image/dir.go | hash_of)
	mkdir -p "$images"
	AGENTRUN_STATE=$images "$build/agentrun" image build --debian bookworm \
		--include python3,python3-numpy,python3-matplotlib -t python:3.12-slim >&2
	keep_one "$images"
}

# Tests use what users install, not the tree.
make_wheel() {
	rm -rf "$work/dist" "$work/site"
	"$venv/bin/python" -m build --no-isolation --wheel --outdir "$work/dist" "$sdk" >"$work/build.log" 2>&1 || {
		cat "$work/build.log" >&2
		die "the wheel cannot be built"
	}
	"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target "$work/site" "$work"/dist/*.whl
}

check() (
	cd "$sdk"
	ruff() { "$venv/bin/python" -m ruff "$@" --quiet --config pyproject.toml . "$repo/examples/python"; }
	ruff format --check
	ruff check
	"$venv/bin/python" -m mypy --no-error-summary
)

mkdir -p "$work"
make_venv
make_image
check
make_wheel
export AGENTRUN_TEST_PROGRAM=$build/agentrun AGENTRUN_TEST_IMAGES=$images/images PYTHONPATH=$work/site
cd "$sdk"
# An interrupted run still ends its daemon and sandboxes, also one in the background of a
# script, where interrupts are ignored.
exec env --default-signal=INT timeout --signal=INT --kill-after=60 900 "$venv/bin/python" -m pytest "$@"
