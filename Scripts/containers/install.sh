#!/usr/bin/env bash
# Runs while an image of Ubuntu 24.04 is built: installs Python with all that the repository needs, for one device.
#
#   bash install.sh cuda | rocm<version> | xpu | cpu
#
# requirements.txt lies beside this file. The argument also names torch's package index, such as rocm7.1
# (https://download.pytorch.org/whl/); cuda uses the default one. The libraries of CUDA and ROCm come with torch, and
# the driver is the host's; for Intel, the user-space part of the driver must be in the image.
set -euo pipefail

folder=$(dirname "${BASH_SOURCE[0]}")
device=${1:-}
packages=(ca-certificates gcc git libc6-dev python3 python3-dev python3-venv)  # gcc and the headers are for torch.compile
index=(--index-url "https://download.pytorch.org/whl/$device")
case $device in
    cuda) index=() ;;
    rocm[0-9]*) packages+=(libdrm-amdgpu1 libelf1t64 libnuma1) ;;
    xpu) packages+=(libze1 libze-intel-gpu1 intel-opencl-icd) ;;
    cpu) ;;
    *)
        echo "error: the device is cuda, rocm and its version such as rocm7.1, xpu or cpu, not \"$device\"." >&2
        exit 43
        ;;
esac

export DEBIAN_FRONTEND=noninteractive
apt-get update
if [[ $device == xpu ]]; then
    apt-get install --yes --no-install-recommends ca-certificates curl gpg
    curl --fail --silent --show-error https://repositories.intel.com/gpu/intel-graphics.key \
        | gpg --dearmor --output /usr/share/keyrings/intel-graphics.gpg
    source="deb [arch=amd64 signed-by=/usr/share/keyrings/intel-graphics.gpg]"
    echo "$source https://repositories.intel.com/gpu/ubuntu noble unified" > /etc/apt/sources.list.d/intel-graphics.list
    apt-get update
fi
apt-get install --yes --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*

python3 -m venv "$folder"
# First torch, from the index of the device: among several indexes pip would choose by version.
"$folder/bin/pip" install --no-cache-dir "${index[@]}" "$(grep '^torch==' "$folder/requirements.txt")"
"$folder/bin/pip" install --no-cache-dir -r "$folder/requirements.txt"
"$folder/bin/pip" check
