#!/usr/bin/env bash
# Installs what the tests need from the system, where this user may: gcc and the GMP headers, for the case that
# fastecdsa (a dependency of libp2p) has no wheel for this platform and is built from source.
set -u

have_gmp() { printf '#include <gmp.h>\nint main(void){return 0;}\n' | cc -x c -fsyntax-only - 2>/dev/null; }

if have_gmp; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev libgmp-dev >/dev/null
fi
if ! have_gmp; then
    echo "note: no C compiler with GMP headers; install gcc and libgmp-dev if installing fastecdsa fails" >&2
fi
