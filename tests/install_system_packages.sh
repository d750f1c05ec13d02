#!/usr/bin/env bash
# Installs what the tests need from the system, where this user may: gcc and the GMP headers, for the case that
# fastecdsa (a dependency of libp2p) has no wheel for this platform and is built from source; iproute2 and nftables, for
# tests in network namespaces; Chromium with its driver, for tests of the web page; zbar, which reads the QR code on it;
# and tmux, for tests of terminals. Without them those are skipped.
set -u
PATH=$PATH:/usr/sbin:/sbin

have_gmp() { printf '#include <gmp.h>\nint main(void){return 0;}\n' | cc -x c -fsyntax-only - 2>/dev/null; }
have_net() { command -v ip && command -v tc && command -v ss && command -v nft; } >/dev/null
have_browser() { command -v chromium && command -v chromedriver; } >/dev/null

wanted=()
have_gmp || wanted+=(gcc libc6-dev libgmp-dev)
have_net || wanted+=(iproute2 nftables)
have_browser || wanted+=(chromium chromium-driver)
command -v zbarimg >/dev/null || wanted+=(zbar-tools)
command -v tmux >/dev/null || wanted+=(tmux)
if [ "${#wanted[@]}" = 0 ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${wanted[@]}" >/dev/null
fi
if ! have_gmp; then
    echo "note: no C compiler with GMP headers; install gcc and libgmp-dev if installing fastecdsa fails" >&2
fi
if ! have_net; then
    echo "note: tests in network namespaces will be skipped; they need root, iproute2 and nftables" >&2
fi
if ! have_browser; then
    echo "note: tests of the web page will be skipped; they need chromium and chromedriver" >&2
fi
exit 0
