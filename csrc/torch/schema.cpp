// schema.cpp - Declares all ops. Shapes: N rows, V columns, K entries per row or E in total. A is the arithmetic dtype:
// float64 for float64 logits, otherwise float32. math.h has the formulas.
//
// A target has int32 or int64 `indices` and one of these formats:
//   (N,)    without values                            class labels
//   (N, K)  and values (N, K)                         padded top-k
//   (E,)    and values (E,), offsets (N + 1,)         CSR: row r has the entries [offsets[r], offsets[r + 1])
//   (E,)    and values (E,), offsets (N, 2)           row r has the entries [offsets[r, 0], offsets[r, 1]); no entry
//                                                     belongs to two rows
//   (N, K)  without values                            K ids per row
// Without values every weight is 1. With `logprobs` the weights are exp(values), and the gradient is for the values. An
// entry is padding if its weight is 0, its log-probability is -inf or its class is ignore_index. weight (V,) A holds
// class weights. row_mask (N,) bool is true for active rows. row_scale (N,) or () A multiplies logit_scale.
//
// The logits of forward, forward_with_residual, forward_with_gradient, backward, backward_ and backward_values may also
// be (outer, inner, V): N = outer * inner rows with strided classes, as for images. If the inner stride is 1, they are
// read without a copy. Their gradient has the same shape and the memory layout of (outer, V, inner).
#include "arguments.h"
#include "op_library.h"

#define SCE_HEAD_GRADIENTS "Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale"

SCE_LIBRARY(m) {
  // Returns loss (N,) A and lse = logsumexp(z) (N,) A. Both are 0 in ignored rows.
  m.def("forward(Tensor logits, " SCE_ARGUMENTS ") -> (Tensor loss, Tensor lse)");

  // Also returns lse_residual (N,) A, the rounding error of lse. The gradient needs it: without it, exp(z - lse) has an
  // error of eps * |lse|, which is most of p - 1 if p is close to 1.
  m.def("forward_with_residual(Tensor logits, " SCE_ARGUMENTS ") -> (Tensor loss, Tensor lse, Tensor lse_residual)");

  // Computes `loss_mean` and the `backward` of its gradient grad_mean () A in one call: mean (), divisor (), lse (N,)
  // and lse_residual (N,), all A, and grad_logits (N, V). On a CPU the gradient of a row is written while its logits
  // are in a cache, with one read and one write in total. Results are bitwise equal to those of the separate ops. Also
  // returns the losses (N,) A.
  m.def("forward_with_gradient(Tensor grad_mean, Tensor? normalizer, Tensor logits, " SCE_ARGUMENTS
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor, Tensor loss, Tensor lse, Tensor lse_residual, "
        "Tensor grad_logits)");

  // Writes the same gradient over the logits.
  m.def("forward_with_gradient_(Tensor grad_mean, Tensor? normalizer, Tensor(a!) logits, " SCE_ARGUMENTS
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor, Tensor loss, Tensor lse, Tensor lse_residual)");

  // Returns grad_logits (N, V), in the dtype of logits, for grad_loss * loss + grad_lse * lse summed over the rows.
  // Rows that are ignored or have a zero grad_output get a gradient of 0 and are not read.
  m.def("backward(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor lse, Tensor? lse_residual, " SCE_ARGUMENTS
        ") -> Tensor");

  // Writes the same gradient over the logits.
  m.def(
      "backward_(Tensor grad_loss, Tensor? grad_lse, Tensor(a!) logits, Tensor lse, "
      "Tensor? lse_residual, " SCE_ARGUMENTS ") -> ()");

  // Recomputes the gradient of `backward`, without grad_lse, into grad_logits, which forward_with_gradient computed for
  // expected () A. If the bits of expected and grad_mean () A are equal, nothing is read or written. grad_loss is the
  // gradient of the losses for grad_mean. The host does not wait for the device.
  m.def(
      "backward_anew_(Tensor expected, Tensor grad_mean, Tensor grad_loss, Tensor logits, Tensor lse, "
      "Tensor? lse_residual, Tensor(a!) grad_logits, " SCE_ARGUMENTS ") -> ()");

  // Returns grad_values A, with the shape of values: the gradient of sum(grad_loss * loss). It is 0 for padding.
  m.def("backward_values(Tensor grad_loss, Tensor logits, Tensor lse, Tensor? lse_residual, " SCE_ARGUMENTS
        ") -> Tensor");

  // Returns the mean of loss (N,) A over active rows and its divisor, both () A. The divisor is `normalizer` () A if it
  // is given. Otherwise it is the sum of the labels' class weights for class labels, and the number of active rows for
  // other targets. If there are no active rows, or the divisor is 0, the mean is 0 and the divisor inf. row_weight (N,)
  // A multiplies the losses but not the divisor. A row weight of 0 hides a loss, even if it is inf or NaN.
  m.def("loss_mean(Tensor loss, Tensor? normalizer, " SCE_TARGET
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor)");

  // Returns the log-probabilities of the entries' classes, with the shape of indices, and further outputs (N,) from the
  // same read of the logits. All are A, except that argmax and rank are int64; outputs that are not requested are (0,).
  // select.h has the formulas. Weights determine the loss and the padding, which gets padding_value. Ignored rows get
  // 0, and -1 for argmax and rank.
  m.def("select(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS ") -> " SCE_SELECTED);

  // Returns grad_logits (N, V), in the dtype of logits, for the sum of all outputs times their gradients. Also returns
  // grad_scale (N,) A, the gradient of row_scale, or (0,). log_tail, entropy and collision are the outputs of select
  // and are required if they have a gradient. With first_class the logits are a shard of num_classes classes; see
  // select_shard.
  m.def("select_backward(" SCE_GRAD_OUTPUTS ", Tensor logits, " SCE_SAVED ", " SCE_ARGUMENTS
        ", bool scale_grad=False, SymInt? first_class=None) -> (Tensor grad_logits, Tensor grad_scale)");

  // Writes the same gradient over the logits.
  m.def("select_backward_(" SCE_GRAD_OUTPUTS ", Tensor(a!) logits, " SCE_SAVED ", " SCE_ARGUMENTS
        ", bool scale_grad=False, SymInt? first_class=None) -> Tensor");

  // Computes select's statistics for one shard of the classes, when these are sharded over several processes. logits
  // (N, C) are those of the classes from first_class on; C may be 0. Returns statistics (N, S) A, where S depends on
  // the requested outputs (at least 2). If log_probs are requested, also returns the logits of the shard's own entries,
  // with the shape of indices and 0 for the others. num_classes is the global number of classes. The target and the
  // class weights are global on every process. The output rank requires ranked_logits (N,) A: the logit of the class of
  // each row's first entry, before the transform. The class may belong to another shard.
  m.def("select_shard(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ", SymInt first_class=0, Tensor? ranked_logits=None) -> (Tensor statistics, Tensor chosen)");

  // Computes the outputs of select for all classes from the concatenated statistics of all shards (shards * N, S) and
  // the sum of their `chosen` logits. For the gradient, call select_backward with these outputs and first_class.
  m.def("select_merge(Tensor statistics, SymInt shards, Tensor? chosen, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ") -> " SCE_SELECTED);

  // Computes the same for the logits z = input linear_weight^T + linear_bias, which are never materialized. Logits are
  // computed for chunk_rows rows at a time; the default is a memory budget. input (N, D), linear_weight (V, D) and
  // linear_bias (V,) have one dtype, or float32 weight and bias with a 16-bit input. 16-bit logits are rounded to 16
  // bits unless float32_logits is set. Only the first num_classes rows of the weight are read. The op is differentiable
  // and consists of the ops below.
  //
  // With `mean` the loss is the mean of loss_mean, (), and its gradients are computed in forward. If `detached`, only
  // the loss has a gradient.
  //
  // With a group, linear_weight (C, D) is a shard of num_classes classes, from first_class on; C may be 0. input and
  // all other arguments are equal on every rank. The gradient for input is all-reduced, so it is equal as well. With
  // `shares_rows` input and its gradient are sharded over the rows, equally and in rank order. chunk_rows must be equal
  // on every rank. Graphs contain the collectives.
  m.def("linear_select(" SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_OUTPUTS ", " SCE_CHUNKS
        ", bool mean=False, Tensor? normalizer=None, Tensor? row_weight=None, bool detached=False, str group='', int "
        "ranks=1, SymInt first_class=0, bool shares_rows=False) -> " SCE_SELECTED);

  // Computes linear_select, and the gradients of sum(grad_loss * loss) for input, linear_weight and linear_bias, each
  // with the shape and dtype of its tensor, and for a row_scale () of all rows. Those not requested are (0,). One GEMM
  // computes the logits.
  m.def("linear_select_with_gradient(Tensor grad_loss, " SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_OUTPUTS ", " SCE_CHUNKS
        ", " SCE_HEAD_NEEDS_GRAD
        ", bool scale_grad=False) -> "
        "(" SCE_SELECTED_OUTPUTS ", " SCE_HEAD_GRADIENTS ")");

  // Returns the same gradients for the sum of all outputs times their gradients. The logits are recomputed.
  m.def("linear_select_backward(" SCE_GRAD_OUTPUTS ", " SCE_HEAD ", " SCE_SAVED ", " SCE_ARGUMENTS ", " SCE_CHUNKS
        ", " SCE_HEAD_NEEDS_GRAD ", bool scale_grad=False) -> (" SCE_HEAD_GRADIENTS ")");

  // Returns the logits of all rows (N, V) as the head's losses compute them. They have the dtype of input, or float32
  // if float32_logits is set or a CPU gets a 16-bit input. Not differentiable.
  m.def("linear_logits(" SCE_HEAD ", SymInt? num_classes=None, bool float32_logits=False) -> Tensor");

  // Writes them into `logits` (N, classes), in the dtype of the memory that linear_plan returns.
  m.def("linear_logits_(" SCE_HEAD ", Tensor(a!) logits, bool float32_logits=False) -> ()");

  // Plans the chunks of a head of which `rows` are multiplied. grad_weight (V, D) is memory for the weight's gradient.
  // Returns the rows of a chunk, and memory for its logits (chunk_rows * classes,). stored_classes and `beside` are
  // arguments of linear_store_; stored_classes is 0 if the gradients of chunks are to be added instead.
  //
  // chunk_classes is not 0 if a gradient is best computed from recomputed logits, for all rows and so many classes at a
  // time. That is possible if `recomputes` is true (in backward) or false (in forward, if it saves memory). `ample`
  // allows larger chunks on a GPU, for a loss whose weight has a gradient. `copies_rows` is true if the caller copies
  // the rows of a chunk and of its gradient. If `converts` is true, a weight of another dtype than `input` is best
  // converted by the caller, once for all chunks.
  m.def(
      "linear_plan(Tensor input, Tensor? grad_weight, SymInt rows, SymInt classes, SymInt? chunk_rows=None, "
      "bool float32_logits=False, bool? recomputes=None, bool ample=False, bool copies_rows=False) -> (SymInt "
      "chunk_rows, SymInt stored_classes, SymInt chunk_classes, bool converts, Tensor logits, Tensor beside)");

  // Returns contiguous uninitialized memory with the shape (N, D) and the dtype of `like`. On a CPU large memory is
  // reused.
  m.def("large_empty_like(Tensor like) -> Tensor");

  // Accumulates the contribution of grad_logits (N, classes), the gradient of these rows' logits, to the gradients of a
  // head. Writes grad_input (N, D), or adds to it from the second block of classes on. Writes (first chunk of rows) or
  // adds to the first `classes` rows of grad_weight (V, D) and grad_bias (V,). input_low (N, D), weight_low
  // (classes, D) and bias_low (1, classes) uint8 hold the low bits of 16-bit sums between chunks.
  m.def("linear_add_gradients_(" SCE_HEAD
        ", Tensor grad_logits, Tensor(a!)? grad_input, Tensor(b!)? input_low, Tensor(c!)? grad_weight, "
        "Tensor(d!)? weight_low, Tensor(e!)? grad_bias, Tensor(f!)? bias_low, bool first, bool last, "
        "bool first_classes=True, bool last_classes=True) -> ()");

  // Stores grad_logits (n, classes) of the rows from `row` on in the memory of grad_weight (V, D), and beside it. After
  // all `rows`, linear_multiply_stored_ computes the weight's gradient from them with one GEMM, and rounds it once. It
  // overwrites the memory for a chunk of logits.
  m.def(
      "linear_store_(Tensor grad_logits, Tensor(a!) grad_weight, Tensor(b!) beside, SymInt row, SymInt rows, "
      "SymInt stored_classes) -> ()");
  m.def(
      "linear_multiply_stored_(Tensor input, Tensor(a!) logits, Tensor(b!) grad_weight, Tensor beside, "
      "SymInt classes, SymInt stored_classes) -> ()");

  // Computes select on every rank of a process group: statistics are gathered, and chosen logits are summed. Each rank
  // passes its own logits and the same arguments. Differentiable; consists of the ops above and of collectives that
  // appear in graphs.
  m.def("sharded_select(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ", str group='', int ranks=1, SymInt first_class=0) -> " SCE_SELECTED);

  // Returns the classes of the k largest logits in each row of (N, V), as (N, k) int64 in descending order, or of the
  // smallest in ascending order. Ties go to the lowest class, which also comes first. NaN is larger than any number.
  m.def("topk_ids(Tensor logits, SymInt k, bool largest=True) -> Tensor");

  // Multiplies gradient by scale () A in place. gradient is packed or has rows with column stride 1. If it was computed
  // for the grad_output `expected` () A, it is multiplied by scale / expected instead. If that is 1, the gradient is
  // neither read nor written; the factor is examined on the device. An `expected` that is 0, not finite or below 2^-40
  // of scale raises an error; on CUDA it gives NaN.
  m.def("scale_(Tensor(a!) gradient, Tensor scale, Tensor? expected=None) -> ()");

  // Returns the head's logits A at the entries of a target only, with the shape of indices. Padding gets -inf, as do
  // all entries of ignored rows and entries that belong to no row. Values only determine the padding.
  m.def("candidate_logits(" SCE_HEAD ", " SCE_CANDIDATES ") -> Tensor");

  // Returns the gradients of candidate_logits, or (0,) if not requested. With a softcap `output` is the forward result.
  m.def("candidate_logits_backward(Tensor grad, Tensor? output, " SCE_HEAD ", " SCE_CANDIDATES ", " SCE_HEAD_NEEDS_GRAD
        ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // Returns the weight gradient as the rows (U, D) of the distinct ids (U,) with a gradient, in ascending order. The
  // host waits for the device to know U.
  m.def("candidate_logits_backward_sparse(Tensor grad, Tensor? output, " SCE_HEAD ", " SCE_CANDIDATES
        ", " SCE_HEAD_NEEDS_GRAD ") -> (Tensor grad_input, Tensor ids, Tensor grad_rows, Tensor grad_bias)");

  // Computes softmax or log-softmax over the entries of each row of a sparse matrix. values are (E,) or (E, D), with an
  // independent softmax for each of the D positions. Row r has the entries order[offsets[r]:offsets[r + 1]]; order (E,)
  // int64 defaults to 0, 1, 2, ...
  m.def("sparse_softmax(Tensor values, Tensor offsets, Tensor? order, bool log) -> Tensor");

  // Returns the gradient for the values, computed from the output.
  m.def("sparse_softmax_backward(Tensor grad, Tensor output, Tensor offsets, Tensor? order, bool log) -> Tensor");

  // Returns the mean of the unmasked elements of input along the dimensions `dim`, in the dtype of input, and its
  // divisor A. input has any floating dtype and strides; mask has its shape and is bool, or weights of an integer or
  // floating dtype. Elements of weight 0 are not read. Without any elements the mean is 0 and the divisor 1.
  m.def("masked_mean(Tensor input, Tensor mask, int[] dim) -> (Tensor mean, Tensor divisor)");

  // Returns the gradient for input, in `dtype`, from share A = grad_output / divisor.
  m.def("masked_mean_backward(Tensor share, Tensor mask, int[] dim, ScalarType dtype) -> Tensor");

  // Computes divergences of a student, logits (N, V), from a teacher (N, V) of any floating dtype. `kind` is a
  // Divergence of divergence_math.h; the last one computes K = 4 of them, the others K = 1. Returns stats (N, 5) A
  // and sums (2 K + 2, N) A, see ops/dense_divergence.h; the first K + 1 sums are the divergences and the cross entropy
  // of labels (N,). Rows where row_mask (N,) is False have divergence 0, and rows with a negative label have cross
  // entropy 0. A row of neither is not read. A teacher's row without divergence is not read either. The number of
  // columns may exceed num_classes.
  m.def("dense_divergence(" SCE_DENSE ") -> (Tensor stats, Tensor sums)");

  // Also returns grad_logits (N, V), the gradient of the sum of the first K + 1 rows of sums times grad (K + 1, N) A.
  // For forward KL the logits are read twice, for others three times, and more often in rows that agree: each time but
  // the first from a cache, if a row of both fits into one.
  m.def("dense_divergence_with_gradient(Tensor grad, " SCE_DENSE
        ") -> (Tensor stats, Tensor sums, Tensor grad_logits)");
  m.def("dense_divergence_with_gradient_(Tensor grad, Tensor(a!) logits, " SCE_DENSE_OPTIONS
        ") -> (Tensor stats, Tensor sums)");

  // Compute stats and sums in two steps. If classes are sharded, stats of all shards are merged before sums, which then
  // are those of this shard, from first_class on; num_classes is the number of classes of all shards.
  m.def("dense_divergence_stats(" SCE_DENSE ") -> Tensor");
  m.def("dense_divergence_sums(Tensor stats, " SCE_DENSE ") -> Tensor");

  // Returns the same gradient from stats and sums, which are those of all shards. It may overwrite the logits of the
  // student, or those of the teacher if they have the same dtype and columns.
  m.def("dense_divergence_backward(Tensor grad, Tensor stats, Tensor sums, " SCE_DENSE ") -> Tensor");
  m.def("dense_divergence_backward_(Tensor grad, Tensor stats, Tensor sums, Tensor(a!) logits, " SCE_DENSE_OPTIONS
        ") -> ()");
  m.def(
      "dense_divergence_backward_teacher_(Tensor grad, Tensor stats, Tensor sums, Tensor logits, Tensor(a!) "
      "teacher, " SCE_DENSE_AFTER_TEACHER ") -> ()");

  // Returns the first K + 1 rows of sums, (K + 1, N) A, for the logits of two heads with V classes: those of
  // dense_divergence with `teacher` the hidden states (N, D2). The logits of chunk_rows rows exist at a time. With a
  // group both heads are sharded over its classes. Consists of ops above.
  m.def("linear_dense_divergence(" SCE_HEAD ", Tensor? teacher_weight, Tensor? teacher_bias, " SCE_DENSE_OPTIONS
        ", " SCE_CHUNKS ", str group='', int ranks=1, bool shares_rows=False) -> Tensor");

  // Returns the sum of these rows times share (K + 1, N) A, (). Its gradients are computed in forward.
  m.def("linear_dense_divergence_sum(Tensor share, " SCE_HEAD
        ", Tensor? teacher_weight, Tensor? teacher_bias, " SCE_DENSE_OPTIONS ", " SCE_CHUNKS
        ", str group='', int ranks=1, bool shares_rows=False) -> Tensor");

  // Also returns the gradients of the sum of these rows times grad (K + 1, N) A, each with the shape and dtype of its
  // tensor, or (0,) if not requested. Four GEMMs.
  m.def("linear_dense_divergence_with_gradient(Tensor grad, " SCE_HEAD
        ", Tensor? teacher_weight, Tensor? teacher_bias, " SCE_DENSE_OPTIONS ", " SCE_CHUNKS
        ", str group='', int ranks=1, bool shares_rows=False, " SCE_HEAD_NEEDS_GRAD
        ") -> (Tensor losses, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // Returns the binary cross entropy of each row, (N,) A, summed over its classes. Classes without an entry have target
  // 0, and the values of a class's entries are added. pos_weight (V,) A multiplies the terms of positives. affine (2,)
  // A holds a scale and a shift of the logits. binary_math.h has the formula. If first_class is given, the logits are
  // those of a shard, num_classes is the number of classes of all shards, and the loss is the contribution of this
  // shard.
  m.def("binary_cross_entropy(" SCE_BINARY ") -> Tensor");

  // Also returns grad_logits (N, V), the gradient of the sum of the losses times grad (N,) A, with one read and one
  // write of the logits in all, and the gradient for affine of each row, (N, 2) A, or (0, 2) if not requested.
  m.def("binary_cross_entropy_with_gradient(Tensor grad, " SCE_BINARY
        ", bool affine_grad=False) -> (Tensor loss, Tensor grad_logits, Tensor grad_affine)");
  m.def("binary_cross_entropy_with_gradient_(Tensor grad, Tensor(a!) logits, " SCE_BINARY_OPTIONS
        ", bool affine_grad=False) -> (Tensor loss, Tensor grad_affine)");

  // Returns the same losses (N,) A for the logits of a head with V classes. The logits of a block of classes exist at a
  // time. With a group the head is sharded over its classes. Consists of ops above.
  m.def("linear_binary_cross_entropy(" SCE_HEAD ", " SCE_BINARY_OPTIONS ", " SCE_CHUNKS
        ", str group='', int ranks=1, bool shares_rows=False) -> Tensor");

  // Returns the sum of these losses times share (N,) A, (). Its gradients are computed in forward.
  m.def("linear_binary_cross_entropy_sum(Tensor share, " SCE_HEAD ", " SCE_BINARY_OPTIONS ", " SCE_CHUNKS
        ", str group='', int ranks=1, bool shares_rows=False) -> Tensor");

  // Also returns the gradients of the sum of the losses times grad (N,) A, each with the shape and dtype of its tensor,
  // or (0,) if not requested. Three GEMMs.
  m.def("linear_binary_cross_entropy_with_gradient(Tensor grad, " SCE_HEAD ", " SCE_BINARY_OPTIONS ", " SCE_CHUNKS
        ", str group='', int ranks=1, bool shares_rows=False, " SCE_HEAD_NEEDS_GRAD
        ", bool affine_grad=True) -> "
        "(Tensor loss, Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_affine)");

  // Returns the instruction set of the CPU kernels: "avx512", "avx2" or "default".
  m.def("cpu_instruction_set() -> str");

  // Makes the CUDA kernels of all later calls of the process sum a row in an order that does not depend on the number
  // of rows.
  m.def("plan_by_classes(bool enabled) -> ()");

  // Returns the architectures of the compiled CUDA kernels, in the format of TORCH_CUDA_ARCH_LIST.
  m.def("cuda_architectures() -> str");
}
