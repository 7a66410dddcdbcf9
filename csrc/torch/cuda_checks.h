// cuda_checks.h - Checks targets and rows on the host, for SPARSE_CE_VALIDATE=1. Without it the kernels skip invalid
// indices or return NaN, because a check waits for the device.
#pragma once

#include "cuda_device.h"
#include "sparse_softmax_ops.h"
#include "views.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <vector>

namespace sparse_ce {
namespace cuda {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) fail("CUDA call failed: ", cudaGetErrorString(error));
}

// Returns true if the current stream is captured into a graph. Then tensors have no values yet.
inline bool is_capturing(const Tensor& like) {
  const DeviceGuard guard(like.get_device_index());
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream_of(like), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Returns true if values can and should be checked.
inline bool validates(const Tensor& like) {
  static const bool requested = [] {
    const char* value = std::getenv("SPARSE_CE_VALIDATE");
    return value && value[0] == '1';
  }();
  return requested && !is_capturing(like);
}

// Copies device arrays to the host, after the preceding work on `stream`.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  const void* of(const void* device, int64_t count, int64_t size) {
    if (!device) return nullptr;
    const auto bytes = static_cast<size_t>(count * size);
    copies_.emplace_back(bytes + 1);
    if (bytes == 0) return copies_.back().data();
    check_cuda(cudaMemcpyAsync(copies_.back().data(), device, bytes, cudaMemcpyDeviceToHost, stream_));
    return copies_.back().data();
  }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_;
  std::vector<std::vector<char>> copies_;
};

inline void check_target(const TargetView& target, const Tensor& like) {
  if (!validates(like)) return;
  const DeviceGuard guard(like.get_device_index());
  HostCopies copies(stream_of(like));
  const int64_t offsets = target.offsets_step == 2 ? 2 * target.rows : target.rows + 1;
  TargetView view = target;
  view.indices = copies.of(target.indices, target.entries, size_of(target.indices_dtype));
  view.values = copies.of(target.values, target.entries, size_of(target.values_dtype));
  view.offsets = copies.of(target.offsets, offsets, size_of(target.offsets_dtype));
  view.row_mask = static_cast<const bool*>(copies.of(target.row_mask, target.rows, sizeof(bool)));
  copies.wait();
  check_entries(view);
}

// Returns false if it does not check. The kernels never access memory outside the entries, even if rows are invalid.
inline bool check_rows(const SparseSoftmaxArgs& args, const Tensor& like) {
  if (!validates(like)) return false;
  const DeviceGuard guard(like.get_device_index());
  HostCopies copies(stream_of(like));
  SparseSoftmaxArgs on_host = args;
  on_host.offsets = copies.of(args.offsets, args.rows + 1, size_of(args.offsets_dtype));
  on_host.order = static_cast<const int64_t*>(copies.of(args.order, args.entries, sizeof(int64_t)));
  copies.wait();
  check_rows_on_host(on_host);
  return true;
}

}  // namespace cuda
}  // namespace sparse_ce
