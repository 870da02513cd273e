#!/bin/sh
# Make .venv and install allranks into it, once. Usage: tools/setup.sh [EXTRAS], where EXTRAS is e.g. "dev" or "dev,docs".
# Everything lands in .venv; nothing outside this directory is changed. PYTHON=... chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

extras="${1:-}"
stamp=".venv/installed-${extras:-demo}"
wanted="$(cat pyproject.toml constraints.txt tools/setup.sh | cksum)"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 2; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    stop "allranks needs Python 3.11 or newer, and '${PYTHON:-python3}' is $("${PYTHON:-python3}" --version 2>&1 || true); install one and run: PYTHON=/path/to/python3 make ..."
}

make_venv() {
    python="$(find_python)"
    say "making .venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear .venv >/dev/null 2>&1 && .venv/bin/python -m pip --version >/dev/null 2>&1 && return
    rm -rf .venv
    stop "'$python -m venv' failed: the venv module is missing; on Debian or Ubuntu: apt install python3-venv"
}

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# torch from PyPI for Linux brings CUDA along (gigabytes); without an NVIDIA driver the CPU build does the same work.
install_torch() {
    torch="$(cat constraints.txt)"
    if [ "$(uname -s)" != Linux ]; then
        say "downloading torch: about 100 MB"
    elif has_nvidia_driver; then
        say "NVIDIA driver found: downloading torch with CUDA: about 3 GB"
    else
        say "no NVIDIA driver: downloading the CPU build of torch: about 200 MB"
        pip install -q --no-deps "$torch+cpu" >.venv/setup.log 2>&1 && return
        pip install -q --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "$torch+cpu" >>.venv/setup.log 2>&1 && return
        say "no index offers the CPU build (see .venv/setup.log): downloading torch with CUDA: about 3 GB"
    fi
    pip install -q "$torch" || stop "pip could not install $torch: its message stands above; run the same command again"
}

has_torch() {
    .venv/bin/python -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' "$(sed 's/.*==//' constraints.txt)" 2>/dev/null
}

is_new_enough .venv/bin/python || make_venv
has_torch || install_torch
case "$extras" in
    "") size="60 MB" ;;
    *) size="150 MB" ;;
esac
say "installing allranks${extras:+ with [$extras]} and what it needs: at most $size"
pip install -q -c constraints.txt -e ".${extras:+[$extras]}" || stop "pip could not install the packages: its message stands above; run the same command again"
echo "$wanted" >"$stamp"
say "done; next time this step is skipped"
