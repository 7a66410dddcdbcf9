// schema.cpp - every op, in one place. Shapes: rows N, columns V, K entries a row or E in all; A is the arithmetic
// dtype, float32, or float64 for float64 logits. Formulas in math.h.
//
// A target is `indices` int32 or int64 with
//   (N,)    and nothing else                          class labels
//   (N, K)  and values (N, K)                         padded top-k
//   (E,)    and values (E,), offsets (N + 1,)         CSR: row r has the entries [offsets[r], offsets[r + 1])
//   (E,)    and values (E,), offsets (N, 2)           row r has the entries [offsets[r, 0], offsets[r, 1]); no entry
//                                                     belongs to two rows
//   (N, K)  and nothing else                          ids, K a row
// Without values every weight is 1; with `logprobs` the weights are exp(values), and the gradient for the values is
// theirs. An entry of weight 0, of log-probability -inf or of class ignore_index is padding. weight (V,) A are class
// weights; row_mask (N,) bool is true where a row counts; row_scale (N,) or () A multiplies logit_scale.
//
// logits of forward, forward_with_residual, forward_with_gradient, backward, backward_ and backward_values may also be
// (outer, inner, V), N = outer * inner rows whose classes are strided, as those of images are. Inner rows that lie side
// by side are read where they lie. Their gradient has this shape, and the layout of (outer, V, inner).
#include "arguments.h"

#define SCE_GRADIENTS "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_values)"

STABLE_TORCH_LIBRARY(sparse_ce, m) {
  // loss (N,) A and lse = logsumexp(z) (N,) A; both 0 in ignored rows.
  m.def("forward(Tensor logits, " SCE_ARGUMENTS ") -> (Tensor loss, Tensor lse)");

  // The same with lse_residual (N,) A, what rounding took from lse. The gradient needs it: exp(z - lse) alone is off by
  // eps * |lse|, which near p = 1 is most of p - 1.
  m.def("forward_with_residual(Tensor logits, " SCE_ARGUMENTS ") -> (Tensor loss, Tensor lse, Tensor lse_residual)");

  // What `loss_mean` makes of the losses and `backward` of grad_mean () A: mean (), divisor (), lse (N,), lse_residual
  // (N,), all A, and grad_logits (N, V). On a CPU each row's gradient is written while its logits are in a cache: one
  // read and one write in all. Bit for bit what the ops one after the other give. The losses (N,) A come with them.
  m.def("forward_with_gradient(Tensor grad_mean, Tensor? normalizer, Tensor logits, " SCE_ARGUMENTS
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor, Tensor loss, Tensor lse, Tensor lse_residual, "
        "Tensor grad_logits)");

  // The same gradient, written over the logits.
  m.def("forward_with_gradient_(Tensor grad_mean, Tensor? normalizer, Tensor(a!) logits, " SCE_ARGUMENTS
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor, Tensor loss, Tensor lse, Tensor lse_residual)");

  // grad_logits (N, V), dtype of logits, of sum(grad_loss * loss + grad_lse * lse). Rows that are ignored or whose
  // upstream gradient is 0 get 0 and are not read.
  m.def("backward(Tensor grad_loss, Tensor? grad_lse, Tensor logits, Tensor lse, Tensor? lse_residual, " SCE_ARGUMENTS
        ") -> Tensor");

  // The same gradient, written over the logits.
  m.def(
      "backward_(Tensor grad_loss, Tensor? grad_lse, Tensor(a!) logits, Tensor lse, "
      "Tensor? lse_residual, " SCE_ARGUMENTS ") -> ()");

  // The gradient of `backward` without grad_lse, written over grad_logits, which forward_with_gradient has made for
  // made_for () A: for the same bits as those of grad_mean () A nothing is read or written. grad_loss is what grad_mean
  // makes of it. No device is waited for.
  m.def(
      "backward_anew_(Tensor made_for, Tensor grad_mean, Tensor grad_loss, Tensor logits, Tensor lse, "
      "Tensor? lse_residual, Tensor(a!) grad_logits, " SCE_ARGUMENTS ") -> ()");

  // grad_values, shape of values, A: the gradient of sum(grad_loss * loss) for the entries' values; 0 for padding.
  m.def("backward_values(Tensor grad_loss, Tensor logits, Tensor lse, Tensor? lse_residual, " SCE_ARGUMENTS
        ") -> Tensor");

  // The mean of loss (N,) A over the rows that count, and what the sum was divided by, both () A: the sum of the
  // labels' class weights for class labels, else the number of rows that are not ignored; `normalizer` () A where there
  // is one. Over nothing, or by 0: 0 and inf. row_weight (N,) A multiplies the losses, and changes nothing of the
  // divisor; 0 hides a loss.
  m.def("loss_mean(Tensor loss, Tensor? normalizer, " SCE_TARGET
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor divisor)");

  // The log-probabilities of the entries' classes, in the shape of indices, and what one read of the logits gives
  // beside them, (N,); all A but argmax, which is int64; (0,) where it is not asked for. Formulas in select.h. Weights
  // say what is padding, which gets padding_value, and in the loss what they always say. Rows that are ignored: 0, and
  // -1 for argmax.
  m.def("select(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ") -> (Tensor loss, Tensor lse, Tensor lse_residual, Tensor log_probs, Tensor log_tail, Tensor entropy, "
        "Tensor mean_logit, Tensor argmax)");

  // grad_logits (N, V), dtype of logits, of the sum of products of the outputs with their gradients, and grad_scale
  // (N,) A, that of the row's row_scale, or (0,). log_tail and entropy are what select gave, where there is a gradient
  // for them. With first_class the logits are those of some of num_classes classes: see select_shard.
  m.def("select_backward(" SCE_UPSTREAM
        ", Tensor logits, Tensor lse, Tensor? lse_residual, Tensor? log_tail, Tensor? entropy, " SCE_ARGUMENTS
        ", bool scale_grad=False, int? first_class=None) -> (Tensor grad_logits, Tensor grad_scale)");

  // The same gradient, written over the logits.
  m.def("select_backward_(" SCE_UPSTREAM
        ", Tensor(a!) logits, Tensor lse, Tensor? lse_residual, Tensor? log_tail, Tensor? entropy, " SCE_ARGUMENTS
        ", bool scale_grad=False, int? first_class=None) -> Tensor");

  // select where the classes are shared out among several processes. Each tells of its logits (N, C), those of the
  // classes from first_class on, what the others need: statistics (N, S), S numbers of A each, 2 and what the outputs
  // ask for; and where log_probs are wanted the logits of the entries that it holds, in the shape of indices, 0 for
  // others. C may be 0. num_classes is that of all; the target and the class weights are whole everywhere.
  m.def("select_shard(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ", int first_class=0) -> (Tensor statistics, Tensor chosen)");

  // What select gives of all classes, from the statistics of all shards, one after the other (shards * N, S), and the
  // sum of what they have chosen. Their gradient is that of select_backward with these outputs and first_class.
  m.def("select_merge(Tensor statistics, int shards, Tensor? chosen, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ") -> (Tensor loss, Tensor lse, Tensor lse_residual, Tensor log_probs, Tensor log_tail, Tensor entropy, "
        "Tensor mean_logit, Tensor argmax)");

  // The same for logits that never exist: z = input linear_weight^T + linear_bias, chunk_rows rows at a time (as many
  // as fit a budget by default). input (N, D), linear_weight (V, D), linear_bias (V,): of one dtype, or weight and bias
  // of float32 with an input of 16 bits. Of 16 bits z is rounded to them on the way, but not with float32_logits. Only
  // the first num_classes rows of the weight are read.
  m.def("linear_forward(" SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_CHUNKS ") -> (Tensor loss, Tensor lse)");
  m.def("linear_forward_with_residual(" SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_CHUNKS
        ") -> (Tensor loss, Tensor lse, Tensor lse_residual)");

  // The mean of these losses, as `loss_mean` makes it, () A, and lse (N,) A. Its gradients are made in forward.
  m.def("linear_mean(" SCE_HEAD ", " SCE_ARGUMENTS ", Tensor? normalizer=None, " SCE_CHUNKS
        ", Tensor? row_weight=None) -> (Tensor mean, Tensor lse)");

  // The same, and beside them entropy (N,) A and argmax (N,) int64 of `select`, (0,) where not asked for. Only the mean
  // has a gradient.
  m.def("linear_mean_with_metrics(" SCE_HEAD ", " SCE_ARGUMENTS ", Tensor? normalizer=None, " SCE_CHUNKS
        ", Tensor? row_weight=None, bool entropy=False, bool argmax=False) -> (Tensor mean, Tensor lse, "
        "Tensor entropy, Tensor argmax)");

  // The gradients of sum(grad_loss * loss + grad_lse * lse) for input, linear_weight, linear_bias and values (A), each
  // of the shape and dtype of its tensor; (0,) where it is not asked for. The logits are made anew.
  m.def("linear_backward(Tensor grad_loss, Tensor? grad_lse, " SCE_HEAD
        ", Tensor lse, Tensor? lse_residual, " SCE_ARGUMENTS ", " SCE_CHUNKS ", " SCE_WANTED ") -> " SCE_GRADIENTS);

  // linear_mean and its gradients for the upstream gradient grad_mean () A, with one GEMM for the logits; the losses,
  // and where they are asked for entropy (N,) A and argmax (N,) int64, see select.
  m.def("linear_forward_with_gradient(Tensor grad_mean, Tensor? normalizer, " SCE_HEAD ", " SCE_ARGUMENTS
        ", " SCE_CHUNKS ", " SCE_WANTED
        ", Tensor? row_weight=None, bool entropy=False, bool argmax=False) -> (Tensor mean, Tensor divisor, "
        "Tensor loss, Tensor lse, Tensor lse_residual, Tensor entropy, Tensor argmax, Tensor grad_input, Tensor "
        "grad_weight, Tensor grad_bias, Tensor grad_values)");

  // select of such logits, and its gradients.
  m.def("linear_select(" SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_OUTPUTS ", " SCE_CHUNKS
        ") -> (Tensor loss, Tensor lse, Tensor lse_residual, Tensor log_probs, Tensor log_tail, "
        "Tensor entropy, Tensor mean_logit, Tensor argmax)");
  m.def("linear_select_backward(" SCE_UPSTREAM ", " SCE_HEAD
        ", Tensor lse, Tensor? lse_residual, Tensor? log_tail, Tensor? entropy, " SCE_ARGUMENTS ", " SCE_CHUNKS
        ", " SCE_WANTED
        ", bool scale_grad=False) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_values, "
        "Tensor grad_scale)");

  // The logits of all rows, (N, V), as the losses of the head make them: of the dtype of input, but float32 where
  // that is one of 16 bits on a CPU, or they are asked for. Without a gradient.
  m.def("linear_logits(" SCE_HEAD ", int? num_classes=None, bool float32_logits=False) -> Tensor");

  // Adds what the gradient grad_logits (N, classes) of the logits of these rows contributes to the gradients of a head:
  // writes grad_input (N, D), and to grad_weight (V, D) and grad_bias (V,) adds, or for the first chunk writes, their
  // first rows. weight_low (classes, D) and bias_low (1, classes) uint8 hold what sums of 16 bits have no room for
  // between two chunks.
  m.def("linear_add_gradients_(" SCE_HEAD
        ", Tensor grad_logits, Tensor(a!)? grad_input, Tensor(b!)? grad_weight, Tensor(c!)? weight_low, "
        "Tensor(d!)? grad_bias, Tensor(e!)? bias_low, bool first, bool last) -> ()");

  // Both on every rank of a process group: the statistics are gathered, what was chosen is added up. Each rank gives
  // its own logits and the same arguments. Differentiable; made of the ops above and collectives, which graphs show.
  m.def("sharded_select(Tensor logits, " SCE_ARGUMENTS ", " SCE_OUTPUTS
        ", str group='', int ranks=1, int first_class=0) -> (Tensor loss, Tensor lse, Tensor lse_residual, "
        "Tensor log_probs, Tensor log_tail, Tensor entropy, Tensor mean_logit, Tensor argmax)");

  // The same for the logits of a head, of whose classes each rank holds some: linear_weight (C, D), C may be 0. input
  // and all else are the same on every rank, and so is the gradient for input, which is added up. With
  // `shares_rows` input, and so its gradient, is a share of the rows, as many on each rank, in the order of ranks. With
  // `mean` the loss is that of loss_mean, (), and its gradients are made in forward. chunk_rows must be the same on
  // every rank.
  m.def("sharded_linear_select(" SCE_HEAD ", " SCE_ARGUMENTS ", " SCE_OUTPUTS ", " SCE_CHUNKS
        ", bool mean=False, Tensor? normalizer=None, Tensor? row_weight=None, str group='', int ranks=1, "
        "int first_class=0, bool shares_rows=False) -> (Tensor loss, Tensor lse, Tensor lse_residual, "
        "Tensor log_probs, Tensor log_tail, Tensor entropy, Tensor mean_logit, Tensor argmax)");

  // (N, k) int64: the classes of the k largest of each row of logits (N, V), largest first, or of the smallest,
  // smallest first. Of those that tie the lowest are taken and come first; NaN is larger than any number.
  m.def("topk_ids(Tensor logits, int k, bool largest=True) -> Tensor");

  // gradient *= scale () A, in place; packed, or rows of column stride 1. Of one that was made for another upstream
  // gradient, `expected` () A, it is scale / expected. Where that is 1 nothing is read or written; it is looked at
  // where it lies. An expected one that is 0, not finite, or below 2^-40 of scale is an error, on CUDA NaN.
  m.def("scale_(Tensor(a!) gradient, Tensor scale, Tensor? expected=None) -> ()");

  // The head's logits at the entries of a target alone, shape of indices, A: -inf for padding, which beside the
  // target's own is every entry of a row that does not count and one that belongs to no row. Of the values nothing is
  // asked but which are padding.
  m.def("candidate_logits(" SCE_HEAD ", " SCE_CANDIDATES ") -> Tensor");

  // Its gradients, (0,) where one is not asked for. With a softcap `output` is what forward gave.
  m.def("candidate_logits_backward(Tensor grad, Tensor? output, " SCE_HEAD ", " SCE_CANDIDATES ", " SCE_HEAD_WANTED
        ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // The same, but of the gradient for the weight only the rows (U, D) of the ids (U,) that have one, ascending. Waits
  // for the device to know U.
  m.def("candidate_logits_backward_sparse(Tensor grad, Tensor? output, " SCE_HEAD ", " SCE_CANDIDATES
        ", " SCE_HEAD_WANTED ") -> (Tensor grad_input, Tensor ids, Tensor grad_rows, Tensor grad_bias)");

  // Softmax, or its logarithm, over the entries of each row of a sparse matrix: values (E,) or (E, D), each of D
  // positions alone. Row r has the entries [offsets[r], offsets[r + 1]) of order (E,) int64, without it of 0, 1, 2, ...
  m.def("sparse_softmax(Tensor values, Tensor offsets, Tensor? order, bool log) -> Tensor");

  // Its gradient for the values, from the output.
  m.def("sparse_softmax_backward(Tensor grad, Tensor output, Tensor offsets, Tensor? order, bool log) -> Tensor");

  // The mean of the elements of input, of any floating dtype and strides, that a mask of its shape leaves, along the
  // dimensions `dim`, in its dtype, and what the sum was divided by, A. mask: bool, or weights of an integer or
  // floating dtype. Elements of weight 0 are not looked at. Over nothing: 0 and 1.
  m.def("masked_mean(Tensor input, Tensor mask, int[] dim) -> (Tensor mean, Tensor divisor)");

  // Its gradient for input, of dtype `dtype`, from share A, the upstream gradient over the divisor.
  m.def("masked_mean_backward(Tensor share, Tensor mask, int[] dim, ScalarType dtype) -> Tensor");

  // "avx512", "avx2" or "default": the path that the CPU kernels take.
  m.def("cpu_instruction_set() -> str");

  // The architectures that the CUDA kernels were compiled for, as TORCH_CUDA_ARCH_LIST writes them.
  m.def("cuda_architectures() -> str");
}
