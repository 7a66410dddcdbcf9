#include "device/select_kernels.cuh"

template struct sparse_ce::cuda::SelectLauncher<sparse_ce::BFloat16>;
