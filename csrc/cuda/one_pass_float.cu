#include "device/one_pass_kernel.cuh"

template struct sparse_ce::cuda::OnePassLauncher<float>;
