// cuda_device.h - Replaces csrc/torch/cuda_device.h, so that the emulated kernels process CPU tensors.
#define SPARSE_CE_TORCH_CUDA_DEVICE

#include "../../../csrc/torch/gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#define SCE_DISPATCH_KEY CPU

namespace sparse_ce {
namespace cuda {

struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
inline cudaStream_t stream_of(const Tensor&) { return nullptr; }

// Holds the memory of an H100 unless a test sets another.
inline std::atomic<int64_t> memory{int64_t(79) << 30};
inline std::atomic<int64_t>& memory_of(const Tensor&) { return memory; }

// Holds the sizes of GEMMs: m, k, n of each; and the bytes that copy_matrix has copied.
inline std::vector<int64_t> products;
inline int64_t copied = 0;
inline void record(const Tensor& a, const Tensor& b) {
  products.insert(products.end(), {a.size(0), a.size(1), b.size(1)});
}

inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  record(a, b);
  if (runs) sparse_ce::multiply(out, a, b);
}

inline AOTITorchError add_product(AtenTensorHandle out, AtenTensorHandle to, AtenTensorHandle a, AtenTensorHandle b,
                                  double beta, double alpha) {
  int64_t sizes[3];
  aoti_torch_get_size(a, 0, &sizes[0]), aoti_torch_get_size(a, 1, &sizes[1]), aoti_torch_get_size(b, 1, &sizes[2]);
  products.insert(products.end(), sizes, sizes + 3);
  return runs ? aoti_torch_cpu_addmm_out(out, to, a, b, beta, alpha) : AOTI_TORCH_SUCCESS;
}

// Copies a tensor to `memory`, which is not part of torch's recorded allocations.
inline Tensor widened(const Tensor& t, std::vector<float>& memory) {
  memory.resize(static_cast<size_t>(t.numel()));
  Tensor wide = torch::stable::from_blob(memory.data(), t.sizes(), std::array{t.size(1), int64_t(1)}, t.device(),
                                         ScalarType::Float);
  torch::stable::copy_(wide, t);
  return wide;
}

// mm has no wider result on a CPU, so the operands are converted first.
inline void multiply_widening(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::vector<float> of_a, of_b;
  record(a, b);
  if (runs) sparse_ce::multiply(out, widened(a, of_a), widened(b, of_b));
}

inline cudaError_t copy_matrix(Tensor to, const Tensor& from) {
  copied += to.numel() * to.element_size();
  if (runs) torch::stable::copy_(to, from);
  return cudaSuccess;
}

inline std::string instruction_set() { return "emulated CUDA"; }
// Returns the previous setting.
inline bool emulation_runs(bool from_now_on) { return std::exchange(runs, from_now_on); }
// Returns the number of kernel launches since the last call.
inline int64_t emulation_launches() { return launches.exchange(0); }
// Sets the memory of the device, and returns the previous setting.
inline int64_t emulation_memory(int64_t bytes) { return memory.exchange(bytes); }
// Return m, k, n of each GEMM, and the bytes copied to stored gradients, since the last call.
inline std::vector<int64_t> emulation_products() { return std::exchange(products, {}); }
inline int64_t emulation_copied() { return std::exchange(copied, 0); }

}  // namespace cuda
}  // namespace sparse_ce

STABLE_TORCH_LIBRARY_FRAGMENT(sparse_ce, m) {
  m.def("emulation_runs(bool from_now_on) -> bool");
  m.def("emulation_launches() -> int");
  m.def("emulation_memory(int bytes) -> int");
  m.def("emulation_products() -> int[]");
  m.def("emulation_copied() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(sparse_ce, CompositeExplicitAutograd, m) {
  m.impl("emulation_runs", TORCH_BOX(&sparse_ce::cuda::emulation_runs));
  m.impl("emulation_launches", TORCH_BOX(&sparse_ce::cuda::emulation_launches));
  m.impl("emulation_memory", TORCH_BOX(&sparse_ce::cuda::emulation_memory));
  m.impl("emulation_products", TORCH_BOX(&sparse_ce::cuda::emulation_products));
  m.impl("emulation_copied", TORCH_BOX(&sparse_ce::cuda::emulation_copied));
  m.impl("cpu_instruction_set", TORCH_BOX(&sparse_ce::cuda::instruction_set));
}
