// device.h - Declares what the ops need of a device. Cpu and Cuda implement it; the compiler checks that both do.
//
// An op is a template over the class of its device, because PyTorch registers functions, not objects. It calls
// `device_t().member(...)`. A device also has a type `Plan` with the constants of linear/head.h.
#pragma once

#include "../ops/kernels.h"
#include "gemm.h"

#include <initializer_list>
#include <optional>

namespace sparse_ce {

class Device {
 public:
  // Run a kernel on the device of the tensor `like`.
#define SCE_DECLARE(name, args_t) virtual void name(const args_t& args, const Tensor& like) const = 0;
  SCE_KERNELS(SCE_DECLARE, SCE_DECLARE)
#undef SCE_DECLARE

  // Compute what `forward` and `backward` describe, with one read of the logits if possible. `backward` has the rows of
  // `forward` and reads what it writes.
  virtual void cross_entropy_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward,
                                                   const Tensor& like) const = 0;

  // Raises an error if an entry of the target is invalid. Called before any work. A GPU does it only on request,
  // because it must wait.
  virtual void check_target(const TargetView& target, const Tensor& like) const = 0;
  // Raises an error if the rows of a sparse softmax are invalid. Returns false if it did not check them.
  virtual bool check_rows(const SparseSoftmaxArgs& args, const Tensor& like) const = 0;
  // Raises an error if the host may not wait for the device. Called before it does.
  virtual void check_may_wait(const Tensor&) const {}

  // Returns memory for a large output.
  virtual Tensor empty_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) const {
    return empty(like, sizes, dtype);
  }

  // The rest is for the linear head.

  // Returns the dtype in which a head multiplies an input of this dtype.
  virtual ScalarType work_dtype(ScalarType input, bool float32_logits) const = 0;
  // Returns the dtype of a product of two matrices of this dtype, before it is rounded or accumulated.
  virtual ScalarType product_dtype(ScalarType work) const { return work; }
  // Returns the dtype of logits that are returned to the caller.
  virtual ScalarType logits_dtype(ScalarType input) const = 0;
  // Computes out = a b. The dtype of `out` is that of a and b, or product_dtype.
  virtual void multiply(const Tensor& out, const Tensor& a, const Tensor& b) const = 0;
  // Computes out = to + a b. `to` is `out` or a vector, which is added to each row.
  virtual void add_product(const Tensor& out, const Tensor& to, const Tensor& a, const Tensor& b) const = 0;
  // Copies a matrix with packed rows to one of the same dtype.
  virtual void copy_matrix(const Tensor& to, const Tensor& from) const = 0;

  // Returns how many bytes the logits of a chunk may take if memory is ample, and 0 if it never is.
  virtual int64_t ample_bytes(const Tensor&) const { return 0; }
  // Called after memory was short: ample_bytes then returns 0 for the rest of the process.
  virtual void forgo_ample_chunks(const Tensor&) const {}

 protected:
  ~Device() = default;
};

}  // namespace sparse_ce
