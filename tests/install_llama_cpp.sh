#!/usr/bin/env bash
# Builds the server of llama.cpp for the ordeal that samples through it, from the source package of llama-cpp-python,
# and puts it where its only argument says. Wants cmake and a C++ compiler; takes some six minutes of one core. Without
# them, or without the package, that ordeal is skipped.
set -euo pipefail
to=$1
pip=$(dirname "$to")/pip
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
skip() { echo "note: llama.cpp's server is not built, and its ordeal is skipped: $1" >&2; exit 0; }
broken() { tail -n 20 "$here/log" >&2; exit 1; }

if ! { command -v cmake && command -v c++; } >/dev/null; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || skip "it needs cmake and g++"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq cmake g++ make >/dev/null; } ||
        skip "cmake and g++ cannot be installed"
fi
"$pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$here" llama-cpp-python==0.3.36 ||
    skip "its source package does not come"
tar -xzf "$here"/llama_cpp_python-*.tar.gz -C "$here"
cmake -S "$here"/llama_cpp_python-*/vendor/llama.cpp -B "$here/build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF >"$here/log" 2>&1 || broken
jobs=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
cmake --build "$here/build" --target llama-server --parallel "$jobs" >>"$here/log" 2>&1 || broken
cp "$here/build/bin/llama-server" "$to.new"
mv "$to.new" "$to"
