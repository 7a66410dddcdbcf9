// sparse_softmax_ops.h - Implements the sparse softmax ops on tensors, for CPU and CUDA.
#pragma once

#include "boxing.h"
#include "device.h"

#include <cmath>
#include <vector>

namespace sparse_ce {

template <typename device_t>
class SparseSoftmaxOps {
 public:
  static Tensor sparse_softmax(const Tensor& values, const Tensor& offsets, const OptionalTensor& order, bool log) {
    const Tensor packed_values = packed(values), packed_offsets = packed(offsets);
    const OptionalTensor packed_order = order ? OptionalTensor(packed(*order)) : order;
    SparseSoftmaxArgs args = view(packed_values, packed_offsets, packed_order, log, "values");
    Tensor result = empty_result(values, args);
    if (!device_t().check_rows(args, values)) torch::stable::fill_(result, NAN);  // for entries that belong to no row
    args.values = packed_values.const_data_ptr();
    args.result = result.mutable_data_ptr();
    if (values.numel() > 0) device_t().sparse_softmax(args, values);
    return result;
  }

  static Tensor sparse_softmax_backward(const Tensor& grad, const Tensor& output, const Tensor& offsets,
                                        const OptionalTensor& order, bool log) {
    const Tensor packed_grad = packed(grad), packed_output = packed(output), packed_offsets = packed(offsets);
    const OptionalTensor packed_order = order ? OptionalTensor(packed(*order)) : order;
    SparseSoftmaxArgs args = view(packed_output, packed_offsets, packed_order, log, "output");
    check_same_device(grad, output, "grad");
    check(grad.scalar_type() == output.scalar_type(), "grad must have the dtype of output (",
          name(output.scalar_type()), "), got ", name(grad.scalar_type()));
    check(same_sizes(grad.sizes(), output.sizes()), "grad must have the shape of output, ", shape(output), ", got ",
          shape(grad));
    Tensor result = empty_result(output, args);
    if (!device_t().check_rows(args, output)) torch::stable::fill_(result, NAN);
    args.grad = packed_grad.const_data_ptr();
    args.output = packed_output.const_data_ptr();
    args.result = result.mutable_data_ptr();
    if (grad.numel() > 0) device_t().sparse_softmax_backward(args, grad);
    return result;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("sparse_softmax", boxed<&sparse_softmax>);
    m.impl("sparse_softmax_backward", boxed<&sparse_softmax_backward>);
  }

 private:
  static Tensor empty_result(const Tensor& like, const SparseSoftmaxArgs& args) {
    return like.dim() == 1 ? device_t().empty_output(like, {args.entries}, like.scalar_type())
                           : device_t().empty_output(like, {args.entries, args.width}, like.scalar_type());
  }

  static SparseSoftmaxArgs view(const Tensor& values, const Tensor& offsets, const OptionalTensor& order, bool log,
                                const char* argument) {
    SparseSoftmaxArgs args{};
    check(values.dim() == 1 || values.dim() == 2, argument, " must be (entries,) or (entries, width), got ",
          shape(values));
    args.dtype = to_dtype(values, argument, /*integer=*/false);
    args.entries = values.size(0);
    args.width = values.dim() == 2 ? values.size(1) : 1;
    args.log = log;
    check_same_device(offsets, values, "offsets");
    check(offsets.dim() == 1 && offsets.size(0) > 0, "offsets must be (rows + 1,), got ", shape(offsets));
    args.offsets_dtype = to_dtype(offsets, "offsets", /*integer=*/true);
    args.offsets = origin(offsets);
    args.rows = offsets.size(0) - 1;
    if (order) {
      check_same_device(*order, values, "order");
      check(order->dim() == 1 && order->size(0) == args.entries, "order must be (", args.entries, ",), got ",
            shape(*order));
      check(order->scalar_type() == ScalarType::Long, "order must be of dtype int64, got ", name(order->scalar_type()));
      args.order = static_cast<const int64_t*>(origin(*order));
    }
    return args;
  }
};

// Checks that the rows partition the entries. `args` points to host memory.
inline void check_rows_on_host(const SparseSoftmaxArgs& args) {
  int64_t before = 0;
  for (int64_t r = 0; r <= args.rows; ++r) {
    const int64_t offset = load_int(args.offsets, args.offsets_dtype, r);
    const bool ascends = before <= offset && offset <= args.entries;
    check(ascends && (r > 0 || offset == 0) && (r < args.rows || offset == args.entries),
          "offsets must ascend from 0 to ", args.entries, " (the number of entries), got ", offset, " at position ", r);
    before = offset;
  }
  std::vector<bool> taken(args.order ? static_cast<size_t>(args.entries) : 0);
  for (int64_t i = 0; args.order && i < args.entries; ++i) {
    const int64_t entry = args.order[i];
    check(0 <= entry && entry < args.entries, "order must be in [0, ", args.entries, "), got ", entry, " at position ",
          i);
    check(!taken[static_cast<size_t>(entry)], "order must contain each entry once, got ", entry, " again at position ",
          i);
    taken[static_cast<size_t>(entry)] = true;
  }
}

}  // namespace sparse_ce
