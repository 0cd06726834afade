# NCCL for NVIDIA clusters, by the number of nodes; read by their .env files.
CUDA_DEVICE_ORDER=PCI_BUS_ID
NCCL_P2P_LEVEL=NVL
NCCL_SHM_DISABLE=0
if ((NODE_COUNT > 1)); then
    NCCL_IB_DISABLE=0
    # Interface names differ between nodes: NCCL and gloo find them better by themselves.
    unset NCCL_NET_DISABLE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
else  # nothing leaves the node
    NCCL_IB_DISABLE=1
    NCCL_NET_DISABLE=1
    GLOO_SOCKET_IFNAME=lo
fi
# Compiled kernels: one cache for each job and node, since nodes lock each other out of a shared one.
source Config/cluster/own_folder.sh
CUDA_CACHE_PATH=$(own_folder "/tmp/cuda_cache_${SLURM_JOB_ID:-$UID}")
