// topk_ops.h - Implements the top-k op on tensors, for CPU and CUDA.
#pragma once

#include "boxing.h"
#include "device.h"

namespace sparse_ce {

template <typename device_t>
class TopkOps {
 public:
  static Tensor topk_ids(const Tensor& logits, int64_t k, bool largest) {
    check(logits.dim() == 2, "logits must be (rows, vocab), got ", shape(logits));
    TopkArgs args{};
    args.dtype = to_dtype(logits, "logits", /*integer=*/false);
    args.rows = logits.size(0);
    args.columns = logits.size(1);
    args.k = k;
    args.largest = largest;
    check(args.columns <= std::numeric_limits<int32_t>::max(), "logits must have fewer than 2^31 classes, got ",
          args.columns);
    check(k >= 0 && k <= args.columns, "k must be in [0, ", args.columns, "] (the number of classes), got ", k);
    const Tensor rows = args.columns == 1 || logits.stride(1) == 1 ? logits : packed(logits);
    args.logits = rows.const_data_ptr();
    args.row_stride = rows.stride(0);
    Tensor ids = empty(logits, {args.rows, k}, ScalarType::Long);
    args.ids = static_cast<int64_t*>(ids.mutable_data_ptr());
    if (args.rows > 0 && k > 0) device_t().topk_ids(args, logits);
    return ids;
  }

  template <typename library_t>
  static void add_to(library_t& m) {
    m.impl("topk_ids", boxed<&topk_ids>);
  }
};

}  // namespace sparse_ce
