// topk_ops.h - the op on tensors, for the CPU and for CUDA alike. `device_t` has topk_ids.
#pragma once

#include "boxing.h"
#include "topk.h"

namespace sparse_ce {

template <typename device_t>
class TopkOps {
 public:
  static Tensor topk_ids(const Tensor& logits, const Tensor& last, const Tensor& above, const Tensor& ids,
                         bool largest) {
    check(logits.dim() == 2, "logits must be (rows, vocab), got ", shape(logits));
    TopkArgs args{};
    args.dtype = to_dtype(logits, "logits", /*integer=*/false);
    args.rows = logits.size(0);
    args.columns = logits.size(1);
    check(ids.dim() == 2 && ids.size(0) == args.rows && ids.scalar_type() == ScalarType::Long, "ids must be (",
          args.rows, ", k) of dtype int64, got ", shape(ids), " of ", name(ids.scalar_type()));
    check(above.dim() == 1 && above.size(0) == args.rows && above.scalar_type() == ScalarType::Long, "above must be (",
          args.rows, ",) of dtype int64, got ", shape(above), " of ", name(above.scalar_type()));
    check_same_device(ids, logits, "ids");
    check_same_device(above, logits, "above");
    int64_t stride = 1;
    const Tensor packed_last = packed(last), packed_above = packed(above);
    args.last = view_rows(packed_last, logits, "last", stride);
    args.above = static_cast<const int64_t*>(packed_above.const_data_ptr());
    args.k = ids.size(1);
    args.largest = largest;
    const Tensor rows = args.columns == 1 || logits.stride(1) == 1 ? logits : packed(logits);
    args.logits = rows.const_data_ptr();
    args.row_stride = rows.stride(0);
    Tensor out = empty(ids, {args.rows, args.k}, ScalarType::Long);
    torch::stable::copy_(out, ids);
    args.ids = static_cast<int64_t*>(out.mutable_data_ptr());
    if (args.rows > 0 && args.k > 0) device_t::topk_ids(args, logits);
    return out;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("topk_ids", boxed<&topk_ids>);
  }
};

}  // namespace sparse_ce
