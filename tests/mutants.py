"""Breaks the code on purpose, one change at a time, and checks that a test notices.

    python tests/mutants.py [-j N] [cuda cpu python trainer] [WORD ...]

A WORD is part of a file's name or of a text: `cpu tile.cpp` runs the CPU's mutants in that file. Each is built, meets
the tests that are about its file, and where those pass all others: a mutant that a test notices costs seconds, a
survivor the whole suite. Not part of `make test`. A change to a kernel's logic should come with a mutant of it.
tests/test_mutants.py checks that every text is there to be changed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flavours import FLAVOURS, digest_of, others

ROOT = Path(__file__).resolve().parent.parent

# (file, text, replacement); `tsan` marks what only a race detector can see.
CUDA = [
    ("csrc/math.h", "a = grad * per_q + grad_lse;", "a = grad * per_q;"),
    ("csrc/math.h", "return (z - lse) - lse_residual;", "return (z - lse) + 64 * lse_residual;"),
    ("csrc/math.h", "weight != acc_t(0)) weighted += weight * shift;", "false) weighted += weight * shift;"),
    ("csrc/math.h", "per_q += acc_t(2) *", "per_q += acc_t(1) *"),
    ("csrc/math.h", "return scale * (acc_t(1) - t * t);", "return scale;"),
    ("csrc/math.h", "acc_t max = Limits<acc_t>::kLowest;", "acc_t max = 0;"),
    ("csrc/math.h", "if (w == acc_t(0)) return;", ""),
    ("csrc/cross_entropy.h", "target.ignored(r) || (upstream", "(upstream"),
    ("csrc/cross_entropy.h", "ignored ? acc_t(0) : out.loss;", "out.loss;"),
    ("csrc/target.h", "return entry.value * class_weight<acc_t>(entry.column);", "return entry.value;"),
    ("csrc/cuda/cross_entropy.cu", "if (args.target.ignored(r)) continue;", ""),
    ("csrc/target.h", "if (value == (logprobs ? -acc_t(INFINITY) : acc_t(0)) || column == ignore_index) return",
     "if (column == ignore_index) return"),
    ("csrc/target.h", "value == (logprobs ? -acc_t(INFINITY) : acc_t(0))", "value == acc_t(0)"),
    ("csrc/target.h", "if (!logprobs) return {column, value};", "return {column, value};"),
    ("csrc/target.h", "return logprobs ? entry.value : acc_t(1);", "return acc_t(1);"),
    ("csrc/target.h", "if (row_mask && !row_mask[r]) return true;", ""),
    ("csrc/target.h", "if (load_int(indices, indices_dtype, i) != ignore_index) return false;\n    return true;",
     "if (load_int(indices, indices_dtype, i) != ignore_index) return false;\n    return false;"),
    ("csrc/target.h", "column >= num_classes) return", "column > num_classes) return"),
    ("csrc/cuda/cross_entropy.cu", "if (k < i && value != acc_t(0)) return acc_t(0);", "// tsan"),
    ("csrc/cuda/cross_entropy.cu", "if (sorted) break;\n      continue;", "break;"),
    ("csrc/cuda/cross_entropy.cu", "if (column < begin || column >= end) continue;  // padding, or another group's",
     "if (column < 0) continue;"),
    ("csrc/cuda/cross_entropy.cu", "write_zeros<kWidth>(gradient, begin, end);\n      continue;", "continue;"),
    ("csrc/cuda/cross_entropy.cu", "if (split == splits - 1) write_zeros<kWidth>(gradient, columns, args.vocab);", ""),
    ("csrc/cuda/cross_entropy.cu", "for (int64_t split = Group::rank(); split < splits; split += kWarp)",
     "for (int64_t split = Group::rank(); split + 1 < splits; split += kWarp)"),
    ("csrc/cuda/row_group.cuh", "for (int64_t s = tail + rank; s < end; s += kWidth) single(s);", ""),
    ("csrc/cuda/row_group.cuh", "for (; c < tail; c += kStride) packs(c, Count<1>{});", ""),
    ("csrc/cuda/row_group.cuh", "if (body > end || !by_packs) body = end;", "if (body > end) body = end;"),
    ("csrc/cuda/row_group.cuh", "__syncthreads();  // the last call's values may still be read", "// tsan"),
    ("csrc/cuda/sparse_softmax.cu", "if (row.end - row.begin > kLongRow) row_t", "if (false) row_t"),
    ("csrc/cuda/sparse_softmax.cu", "by_packs = by_packs && !args.order && args.width == 1;", ""),
    ("csrc/cuda/sparse_softmax.cu", "equally_aligned(grad, output) && equally_aligned(grad, result)", "true"),
    ("csrc/sparse_softmax.h", "return log ? grad : grad * y;", "return grad;"),
    ("csrc/sparse_softmax.h", ": y * (grad - sum);", ": y * grad;"),
    ("csrc/linear.h", "bits + 0x7fu + ((bits >> 8) & 1u)", "bits"),
    ("csrc/linear.h", "x != x ? 0x7fc00000u : bits", "bits"),
    ("csrc/linear.h", "static_cast<uint32_t>(low) << 8);", "0u);"),
    ("csrc/cuda/linear.cu", "if (writes_low) lows.store(args.low + i);", ""),
    ("csrc/cuda/linear.cu", "if (reads_low) lows = lows.load(args.low + i);", ""),
    ("csrc/cuda/linear.cu", "i += threads * kSize) elements", "i += 2 * threads * kSize) elements"),
    ("csrc/cuda/linear.cu", "for (int64_t i = body + thread; i < count;",
     "for (int64_t i = body + thread + 1; i < count;"),
    ("csrc/cuda/linear.cu", "if (!args.target.ignored(r)) continue;", ""),
    ("csrc/cuda/linear.cu", "if (by == 1) return;", ""),
    ("csrc/linear.h", "return x == acc_t(0) ? x : x * by;", "return x * by;"),
    ("csrc/math.h", "return w == acc_t(0) ? acc_t(0) : w * x;", "return w * x;"),
    ("csrc/math.h", "return weight == acc_t(0) ? acc_t(1) : weight;", "return weight;"),
    ("csrc/cuda/masked_mean.cu", "address(tensor) % 16 == 0 && (", "("),
    ("csrc/cuda/masked_mean.cu", "address(args.mask) % std::min<int64_t>(pack * weight, 16) == 0", "true"),
    ("csrc/cuda/masked_mean.cu", "fit = fit && axis.stride.input % pack == 0 && (", "fit = fit && ("),
    ("csrc/cuda/masked_mean.cu", "!differ || axis.stride.mask % pack == 0", "true"),
    ("csrc/cuda/masked_mean.cu", "static_cast<acc_t>(differ ? bytes.at[e] : bytes.at[0])", "acc_t(1)"),
    ("csrc/cuda/masked_mean.cu", "const int64_t column = unit % plan.spans * kSpan;", "const int64_t column = 0;"),
    ("csrc/cuda/masked_mean.cu", "mine[0].merge(single[0]);", ""),
    ("csrc/cuda/masked_mean.cu", "for (int e = 1; e < n; ++e) mine[0].merge",
     "for (int e = 2; e < n; ++e) mine[0].merge"),
    ("csrc/cuda/masked_mean.cu", "quotient_up(end - begin - slot, slots)",
     "quotient_up(end - begin - slot, 2 * slots)"),
    ("csrc/cuda/masked_mean.cu", "share[e * args.columns.stride.out]", "share[0]"),
    ("csrc/cuda/masked_mean.cu", "n > 1 && c < end; c += kWarp", "false; c += kWarp"),
    ("csrc/cuda/masked_mean.cu", "p < parts; p += kWarp) mine.merge", "p < parts && p < kWarp; p += kWarp) mine.merge"),
    ("csrc/cuda/masked_mean.cu", "__syncthreads();  // the last item's sums are read", "// tsan"),
    ("csrc/cuda/cross_entropy.cu", "Group::sync();  // the logits at the entries are read", "// tsan"),
    ("csrc/cuda/cross_entropy.cu", "Group::sync();  // the dense gradient is written", "// tsan"),
]
CPU = [
    ("csrc/math.h", "constexpr int64_t kLanes = 16;", "constexpr int64_t kLanes = 1;"),
    ("csrc/math.h", "k < end - i; ++k) lanes[k] += term(i + k);", "k < 0; ++k) lanes[k] += term(i + k);"),
    ("csrc/cpu/row_passes.h", "double sum = 0;", "float sum = 0;"),
    ("csrc/cpu/row_entries.h", "double sums[kSums] = {};", "acc_t sums[kSums] = {};"),
    ("csrc/cpu/sparse_softmax.cpp", "double sum = 0;", "acc_t sum = 0;"),
    ("csrc/linear.h", "total = first ? product : total + product;", "total = total + product;"),
    ("csrc/linear.h", "const float sum = first ? product :", "const float sum ="),
    ("csrc/math.h", "if (w == acc_t(0)) return;", ""),
    ("csrc/math.h", "return by == acc_t(0) ? acc_t(0) : -by * log_prob(z);", "return -by * log_prob(z);"),
    ("csrc/cpu/row_entries.h", "weights[seen_[slot].position] += weights[k];", ""),
    ("csrc/cpu/row_entries.h", "++row_;", "row_ = 1;"),
    ("csrc/cpu/row_entries.h", "if (!ascending && may_repeat()) merge_duplicates();", ""),
    ("csrc/cpu/row_entries.h", "if (!ascending) order_by_span();", ""),
    ("csrc/cpu/row_entries.h", "move(class_weights, moved_weights_);", ""),
    ("csrc/cross_entropy.h", "(upstream<acc_t>(r) == acc_t(0) && upstream_of_lse<acc_t>(r) == acc_t(0))",
     "upstream<acc_t>(r) == acc_t(0)"),
    ("csrc/cross_entropy.h", "target.ignored(r) || (upstream", "(upstream"),
    ("csrc/cross_entropy.h", "* target.value_slope(entry);", ";"),
    ("csrc/cross_entropy.h", "weight_sum ? *static_cast<const acc_t*>(weight_sum) : static", "static"),
    ("csrc/cpu/row_passes.h", "void write_values(int64_t r) const {\n    if (args_.target.ignored(r)) return;",
     "void write_values(int64_t r) const {"),
    ("csrc/cross_entropy.h", "[r * grad_loss_stride]", "[0]"),
    ("csrc/cross_entropy.h", "[r * grad_lse_stride]", "[0]"),
    ("csrc/cross_entropy.h", "ignored ? acc_t(0) : out.lse;", "out.lse;"),
    ("csrc/cross_entropy.h", "lse_residual)[r] : acc_t(0)", "lse_residual)[0] : acc_t(0)"),
    ("csrc/cross_entropy.h", "if (entry.column < 0) return;", ""),
    ("csrc/cross_entropy.h", "target.class_weight<acc_t>(entry.column) * target.value_slope(entry);",
     "target.value_slope(entry);"),
    ("csrc/cpu/row_passes.h", "return weight ? weight + column : nullptr;", "return weight;"),
    ("csrc/cpu/row_passes.h", "spans_(divide_up(args.vocab, kSpan))", "spans_(divide_up(columns_, kSpan))"),
    ("csrc/cpu/row_entries.h", "kept += entry.column >= 0;", "++kept;"),
    ("csrc/cpu/row_entries.h", "if (!class_weights.empty()) class_weights[kept] = class_weights[k];", ""),
    ("csrc/cpu/row_entries.h", "&& columns[seen_[slot].position] != columns[k]) slot", "&& false) slot"),
    ("csrc/cpu/row_entries.h", "for (; k < size(); ++k) sums[0] += weights[k];", ""),
    ("csrc/cpu/row_passes.h", "std::min(end, columns_)", "end"),
    ("csrc/cpu/cross_entropy.cpp", "for (int64_t r = 0; r < args.rows; ++r) backward.write_entries(r, plans[r]);", ""),
    ("csrc/cpu/row_passes.h", "write_entries(r, plan);\n", "\n"),
    ("csrc/cpu/sparse_softmax.cpp", "!args.order && args.width == 1", "args.width == 1"),
    ("csrc/cpu/sparse_softmax.cpp", "args.row_begin(middle) < entry", "args.row_begin(middle) <= entry"),
    ("csrc/cpu/sparse_softmax.cpp", "stats.merge(Tile", "stats = (Tile"),
    ("csrc/sparse_softmax_ops.h", "(r > 0 || offset == 0)", "true"),
    ("csrc/cpu/tile.cpp", "if (begin < n && !stats.push_near(z, begin, n)) stats.push(z, begin, n);",
     "if (begin < n) stats.push_near(z, begin, n);"),
    ("csrc/cpu/tile.cpp", "class_weight ? class_weight + begin : nullptr, m)", "class_weight, m)"),
    ("csrc/cpu/masked_mean.cpp", "add_lanes<lines>(x, w, i, n - i, ", "add_lanes<lines>(x, w, i, 0, "),
    ("csrc/cpu/masked_mean.cpp", "static_cast<acc_t>(w[r][begin + i]);", "static_cast<acc_t>(w[0][begin + i]);"),
    ("csrc/cpu/masked_mean.cpp", "sum[i - half] += sum[i],", ""),
    ("csrc/cpu/masked_mean.cpp", "weight[i - half] += weight[i];", "weight[i - half] += weight[i - half];"),
    ("csrc/cpu/masked_mean.cpp", "k < waiting; ++k) add_lines<1>(x + k, w + k,",
     "k < 0; ++k) add_lines<1>(x + k, w + k,"),
    ("csrc/cpu/masked_mean.cpp", "static_cast<acc_t>(kept ? 1 : n);", "acc_t(1);"),
    ("csrc/cpu/masked_mean.cpp", "MaskedSum<acc_t>{sum[i], weight[i] + same}", "MaskedSum<acc_t>{sum[i], weight[i]}"),
    ("csrc/cpu/masked_mean.cpp", "line % plan.per_row) * plan.width;", "0) * plan.width;"),
    ("csrc/cpu/masked_mean.cpp", "std::min(line + (kept ? kLines : plan.per_part), end)", "end"),
    ("csrc/cpu/masked_mean.cpp", "total[i].merge(total[p * outputs + i]);", "total[i] = total[p * outputs + i];"),
    ("csrc/cpu/masked_mean.cpp", "write_lanes<acc_t>(share, w, i, n - i, gradient);", ""),
    ("csrc/cpu/masked_mean.cpp", "if (args.columns_kept()) return write(share);", ""),
    ("csrc/masked_mean_ops.h", "if (dtype == ScalarType::Bool ||", "if (dtype == ScalarType::Int ||"),
    ("csrc/masked_mean_ops.h", "check(dtype == number, ", "check(true, "),
    ("csrc/masked_mean_ops.h", "end.input == axis.stride.input && end.mask", "end.mask"),
    ("csrc/masked_mean_ops.h", "end.mask == axis.stride.mask &&\n", "\n"),
    ("csrc/masked_mean_ops.h", "end.out == axis.stride.out)", "true)"),
    ("csrc/masked_mean_ops.h", "if (into.size != 1) return false;", ""),
    ("csrc/masked_mean_ops.h", "return step.input == 1 && (", "return ("),
    ("csrc/masked_mean_ops.h", "(step.mask == 0 || step.mask == 1)", "true"),
    ("csrc/masked_mean_ops.h", "torch::stable::fill_(divisor, 1)", "torch::stable::fill_(divisor, 0)"),
    # Only a processor with AVX-512 notices these.
    ("csrc/cpu/avx512.h", "if (!(std::fabs(reference) < kLargest)) return 0;", ""),
    ("csrc/cpu/avx512.h", "if (_mm512_cmp_ps_mask(block.max, limit, _CMP_NLE_UQ)) break;", ""),
    ("csrc/cpu/avx512.h", " / _mm512_cvtss_f32(top.vector[0])", ""),
    ("csrc/cpu/avx512.h", "if (i < end) {\n      load_first(x + i, end - i, pack);\n      block.push",
     "if (false) {\n      load_first(x + i, end - i, pack);\n      block.push"),
    ("csrc/cpu/avx512.h", "static_cast<float>(std::exp2(-(where * line.slope + line.offset)))", "1.0f"),
    ("csrc/cpu/avx512.h", "static_cast<double>(c.lse) + c.lse_residual", "static_cast<double>(c.lse)"),
    ("csrc/cpu/avx512.h", "std::fabs(factor) > 1e-30f && ", ""),
    ("csrc/cpu/avx512_columns.h", "const __m512i half = _mm512_set1_epi32(0x8000);",
     "const __m512i half = _mm512_set1_epi32(0);"),
    ("csrc/cpu/avx512.h", "{ _mm_setcsr(saved_); }", "{}"),
    ("csrc/scalar_math.h", "x = x < -88.0f ? -88.0f : x;", ""),
    ("csrc/scalar_math.h", "return size < 0.625f ? near : far;", "return near;"),
    ("csrc/dtype.h", "+ 0x7fffu + ((bits >> 16) & 1u)", ""),
    ("csrc/dtype.h", "magnitude >= 0x0f800000u ? special : finite", "finite"),
    ("csrc/cross_entropy_views.h", "if (entry.column < 0 && entry.value != 0) {", "if (false) {"),
    ("csrc/cross_entropy_views.h", "indices.dim() == 1 && !offsets && !values", "!offsets && !values"),
    ("csrc/cross_entropy_views.h", "args.target.logprobs = given.values && given.logprobs;", ""),
    ("csrc/cross_entropy_views.h", "args.weight_sum = held.weight_sum->const_data_ptr();", ""),
    ("csrc/target.h", "std::exp(value)", "value < acc_t(-88) ? acc_t(0) : std::exp(value)"),
    ("csrc/cross_entropy_views.h", "if (target.ignored(r)) continue;\n    const EntryRange", "const EntryRange"),
    ("csrc/cpu/cross_entropy.cpp", "run_backward<scalar_t>(backward_args);\n    return;", "return;"),
    ("csrc/cpu/gradient_memory.cpp", "block.bytes < bytes || ", ""),
    ("csrc/cpu/gradient_memory.cpp", "return in_use() ? cache().take(bytes) : nullptr;", "return cache().take(bytes);"),
    ("csrc/target.h", "weight && labels ? class_weight", "weight ? class_weight"),
    ("csrc/loss_mean.h", "return count == acc_t(0) ? acc_t(INFINITY) : count;", "return count;"),
    ("csrc/loss_mean.h", "if (normalizer) stats.count =", "if (false) stats.count ="),
    ("csrc/linear_ops.h", "return gradient ? *gradient : empty(like, {0}, like.scalar_type());",
     "static const Tensor none = empty(like, {0}, like.scalar_type()); return gradient ? *gradient : none;"),
    ("csrc/cpu/row_passes.h", "if (plan.zero) return entries.clear();", "if (plan.zero) return;"),
    ("csrc/linear.h", "bits + 0x7fu + ((bits >> 8) & 1u)", "bits"),
    ("csrc/linear.h", "static_cast<uint32_t>(low) << 8", "0u"),
    ("csrc/linear.h", "if (last) return from_acc(sum, total);", "if (last && first) return from_acc(sum, total);"),
    ("csrc/linear_head.h", "clear_rows(grad_weight, rows() > 0 ? classes_ : 0, vocab);", ""),
    ("csrc/linear_head.h", "clear_rows(grad_bias, rows() > 0 ? classes_ : 0, vocab);", ""),
    ("csrc/linear_head.h", "clear_rows(grad_weight, rows() > 0 ? classes_ : 0, vocab);",
     "clear_rows(grad_weight, classes_, vocab);"),
    ("csrc/linear_head.h", "if (given && !clear && given->scalar_type() == work_) return *given;",
     "if (given && !clear) return *given;"),
    ("csrc/linear_head.h", "if (live_) clear_other_rows();", ""),
    ("csrc/linear_head.h", "clear_rows(grad_input, from, input_.size(0));", ""),
    ("csrc/linear_head.h", "if (!live_->adjacent(begin, end)) return std::nullopt;", ""),
    ("csrc/linear_head.h", "const int64_t* rows = live_->rows.data() + begin;",
     "const int64_t* rows = live_->rows.data();"),
    ("csrc/linear_head.h", "if (!out) copy_apart(*grad_input, total, begin, /*gather=*/false);", ""),
    ("csrc/linear_head.h", "live_ || input_.scalar_type() != work_ ? 2 * width_ * size : 0;", "0;"),
    ("csrc/live_rows.h", "if (target.ignored(r)) continue;", ""),
    ("csrc/linear_ops.h", "keep(backward.grad_loss, backward.grad_loss_stride);", ""),
    ("csrc/linear_ops.h", "keep(backward.lse, 1);", ""),
    ("csrc/linear_ops.h", "keep(backward.grad_lse, backward.grad_lse_stride);", ""),
    ("csrc/linear_ops.h", "keep(backward.lse_residual, 1);", ""),
    ("csrc/live_rows.h", "of_live.row_mask = nullptr;", ""),
    ("csrc/linear_ops.h", "mean.finish(call.spread(rows.loss));", "mean.finish(rows.loss);"),
    ("csrc/linear_head.h", "first_ = begin == 0,", "first_ = true,"),
    ("csrc/linear_head.h", "last_ = end == rows();", "last_ = false;"),
    ("csrc/linear_head.h", "torch::stable::copy_(part, rows_of(*bias_, v, end));",
     "torch::stable::copy_(part, rows_of(*bias_, 0, end - v));"),
    ("csrc/linear_head.h", "if (out && summed_apart) torch::stable::copy_(*out, total);", ""),
    ("csrc/linear_head.h", "v == 0, end == classes_,", "v == 0, false,"),
    ("csrc/linear_head.h", "v == 0, end == classes_,", "true, end == classes_,"),
    ("csrc/linear_head.h", "low = rows_of(*weight_low_, v, end);", "low = rows_of(*weight_low_, 0, end - v);"),
    ("csrc/linear_head.h", "return total.scalar_type() == work_ && size_in_bytes(work_) > 2;",
     "return total.scalar_type() == work_;"),
    ("csrc/linear_head.h", "args.first = first;", "args.first = true;"),
    ("csrc/linear_head.h", "args.last = last;", "args.last = true;"),
    ("csrc/linear_head.h", "std::max<int64_t>(1, std::max(budget, kLeastCopies) / (row + copies))", "rows()"),
    ("csrc/linear_head.h", "const bool whole = rows() * row <= device_t::kWholeBytes;", "const bool whole = true;"),
    ("csrc/cpu/bindings.cpp", "logits / 40 * logit_bytes", "logits * logit_bytes"),
    ("csrc/linear_ops.h", "dtype, begin * all.grad_loss_stride", "dtype, begin"),
    ("csrc/linear_ops.h", "dtype, begin * all.grad_lse_stride", "dtype, begin"),
    ("csrc/linear_ops.h", "args.lse = advance(all.lse, dtype, begin);", "args.lse = all.lse;"),
    ("csrc/linear_ops.h", "advance(all.lse_residual, dtype, begin)", "all.lse_residual"),
    ("csrc/linear_ops.h", "all.target.offsets ? 0 : begin", "0 * begin"),
    ("csrc/linear_ops.h", "device_t::backward_values(chunk, like);\n        device_t::backward(chunk, like);",
     "device_t::backward(chunk, like);\n        device_t::backward_values(chunk, like);"),
    ("csrc/linear_ops.h", "if (wanted.values) device_t::backward_values(chunk, head.input);", ""),
    ("csrc/linear_ops.h", "args.loss = advance(loss.mutable_data_ptr(), dtype, begin);",
     "args.loss = loss.mutable_data_ptr();"),
    ("csrc/linear_ops.h", "head(without_history(given_head))", "head(given_head)"),
    ("csrc/linear_ops.h", "if (args.rows > 0) device_t::check_target(args.target, input);", ""),
    ("csrc/linear_ops.h", "check_operand(*head.bias, \"linear_bias\");", ""),
    ("csrc/linear_ops.h", "check(gradient.is_contiguous(),", "check(true,"),
    ("csrc/linear_ops.h", "args.target = all.target.slice(begin, begin + args.rows);", ""),
    ("csrc/cpu/linear.cpp", "if (by == 1) return;", ""),
    ("csrc/cpu/linear.cpp", "first = args.first, last = args.last;", "first = args.first, last = true;"),
    ("csrc/cpu/linear.cpp", "return std::strcmp(wish, \"native\") == 0;", "return true;"),
]
PYTHON = [
    ("sparse_ce/ops/library.py", "torch.autograd.graph.increment_version(arguments[at])", "pass"),
    ("sparse_ce/ops/cross_entropy.py", "grad_loss = torch.zeros_like(grad_lse)", "return (None,) * _INPUTS"),
    ("sparse_ce/ops/library.py", "or torch.autograd.forward_ad._current_level >= 0", ""),
    ("sparse_ce/ops/cross_entropy.py", "grad_loss = (grad_loss / divisor).expand", "grad_loss = grad_loss.expand"),
    ("sparse_ce/ops/cross_entropy.py", "return (grad_mean / divisor).expand", "return grad_mean.expand"),
    ("sparse_ce/reference.py", "empty = divisor == 0", "empty = divisor != divisor"),
    ("sparse_ce/functional.py", "normalizer = 1.0  # a mean that divides by 1", "pass"),
    ("sparse_ce/ops/forecast.py", "grad.detach().clone()", "grad.detach()"),
    ("sparse_ce/ops/forecast.py", "_upstream.pop((op, device, dtype), None)", "_upstream.get((op, device, dtype))"),
    ("sparse_ce/ops/forecast.py", "_default_hooks(True) is not None", "_default_hooks(True) == 0"),
    ("sparse_ce/ops/forecast.py", "torch.equal(expected, grad)", "True"),
    ("sparse_ce/ops/cross_entropy.py", "ctx.forecasts and once and grad_lse is None", "ctx.forecasts and once"),
    ("sparse_ce/ops/cross_entropy.py", "ctx.forecasts and once and", "ctx.forecasts and"),
    ("sparse_ce/ops/cross_entropy.py", "(expected, grad_logits), ctx.made = ctx.made, (None, None)",
     "expected, grad_logits = ctx.made"),
    ("sparse_ce/ops/linear.py", "gradients), ctx.made = ctx.made, (None, None)", "gradients) = ctx.made"),
    ("sparse_ce/ops/linear.py", "grad_loss = torch.zeros_like(grad_lse)", "return tuple(all_grads)"),
    ("sparse_ce/ops/linear.py", "plain = not torch.is_grad_enabled() and", "plain ="),
    ("sparse_ce/ops/linear.py", "and grad_lse is None and not batched", "and not batched"),
    ("sparse_ce/ops/linear.py", " and not batched(grad_loss)", ""),
    ("sparse_ce/ops/linear.py", "forecast.remember(\"linear\", grad_loss)", "pass"),
    ("sparse_ce/ops/linear.py", "grad_loss = (grad_loss / divisor).expand", "grad_loss = grad_loss.expand"),
    ("sparse_ce/ops/linear.py", "all_grads[at] = grads[at] if wanted else None", "all_grads[at] = grads[at]"),
    ("sparse_ce/ops/linear.py", "if forecast.hooked():\n        return None", "pass"),
    ("sparse_ce/ops/linear.py", "if expected is None and not half:", "if expected is None:"),
    ("sparse_ce/ops/linear.py", "if eager() and input.is_cpu else None", "if input.is_cpu else None"),
    ("sparse_ce/ops/linear.py", "for g in gradients] if traced else None", "for g in gradients]"),
    ("sparse_ce/ops/linear.py", "torch.where(g == 0, 0.0, g * grad_loss).to", "(g * grad_loss).to"),
    ("sparse_ce/ops/linear.py", "if torch.equal(expected, grad_loss):", "if True:"),
    ("sparse_ce/ops/linear.py", "grad_loss = grad_loss / expected\n", "pass\n"),
    ("sparse_ce/ops/linear.py", "not 2.0 ** -40 < abs(grad_loss) < 2.0 ** 40 or", ""),
    ("sparse_ce/ops/linear.py", " or any(g.dtype == torch.float16 for g in gradients)", ""),
    ("sparse_ce/stock.py", "for t in tensors[1:])", "for t in tensors[1:2])"),
    ("sparse_ce/ops/linear.py", "if like is None or not want else", "if like is None else"),
    ("sparse_ce/ops/library.py", "_library.impl(name, counted, \"ADInplaceOrView\")", "pass"),
    ("sparse_ce/functional.py",
     "return input.to(dtype), cast(linear_weight), None if linear_bias is None else cast(linear_bias)",
     "return input, linear_weight, linear_bias"),
    ("sparse_ce/reference.py", "linear_weight[:a.num_classes].to(dtype)", "linear_weight.to(dtype)"),
    ("sparse_ce/reference.py", "torch.where(ignored[:, None], 0.0, input.to(dtype)),", "input.to(dtype),"),
    ("sparse_ce/modules.py", "return_lse=return_lse, chunk_rows=chunk_rows)", "return_lse=return_lse)"),
    ("sparse_ce/reference.py", "counts = torch.where(counts, a.weight[labels], 0.0)", "counts = a.weight[labels]"),
    ("sparse_ce/reference.py", "torch.where(ignored[:, None], 0.0, logits[:, :num_classes].to(dtype))",
     "logits[:, :num_classes].to(dtype)"),
    ("sparse_ce/reference.py", "of_q = of_q + grad_lse", "pass"),
    ("sparse_ce/guarded.py", "-> Tensor:\n        return torch.where(a == 0, 0.0, a * b)",
     "-> Tensor:\n        return a * b"),
    ("sparse_ce/guarded.py", "return torch.where(dead, 0.0, through)", "return through"),
    ("sparse_ce/sparse_softmax.py", "dim %= input.dim()", "pass"),
    ("sparse_ce/sparse_softmax.py", "wide = values.to(arithmetic_dtype(values.dtype))\n        return _assemble",
     "wide = values\n        return _assemble"),
    ("sparse_ce/sparse_softmax.py", "a.is_cpu and torch.equal(a, b)", "True"),
    ("sparse_ce/sparse_softmax.py", "in_order = dim == len(sizes) - 1 and", "in_order = dim < 9 and"),
    ("sparse_ce/masked_mean.py", "input = input.to(torch.float32)", "pass"),
    ("sparse_ce/masked_mean.py", "mask = mask.to(arithmetic_dtype(input.dtype))",
     "mask = mask.to(torch.int32).float()"),
    ("sparse_ce/masked_mean.py", "_runs(dims, len(shape)) > 3:", "_runs(dims, len(shape)) > 4:"),
    ("sparse_ce/functional.py", "if target is given and ignore_index != IGNORE_INDEX", "if False"),
    ("sparse_ce/functional.py", " and ignore_index != NO_MARK", ""),
    ("sparse_ce/guarded.py", "return times(grad, 1 - (capped / ctx.softcap).square()), None",
     "return grad * (1 - (capped / ctx.softcap).square()), None"),
    ("sparse_ce/ops/masked_mean.py", "(grad_mean / divisor, mask", "(grad_mean, mask"),
    ("sparse_ce/masked_mean.py", "m == 1 or m == n for m, n", "m in (1, n) or n == 1 for m, n"),
    ("sparse_ce/ops/library.py", "if composite(arguments[0]) or needs_grad(*arguments):", "if False:"),
    ("sparse_ce/reference.py", "total = torch.where(weight == 0, 0.0, weight * input.to(dtype)).sum(dim)",
     "total = (weight * input.to(dtype)).sum(dim)"),
    ("sparse_ce/reference.py", "divisor = torch.where(divisor == 0, 1.0, divisor)", "pass"),
    ("sparse_ce/entries.py", "coo.sparse_dim() < 3 or", "coo.sparse_dim() < 4 or"),
    ("sparse_ce/sparse_softmax.py", "(key[1:] != key[:-1]).long()", "(key[1:] == key[:-1]).long()"),
    ("sparse_ce/sparse_softmax.py", "first = torch.arange(crow.shape[0]", "first = torch.zeros(crow.shape[0]"),
    ("sparse_ce/entries.py", "rows, order = torch.sort(rows, stable=True)", "order = torch.arange(len(rows))"),
    ("sparse_ce/rows.py", "mask = moved(mask, 0, False)", "mask = moved(mask, 0, True)"),
    ("sparse_ce/target.py", "values = torch.where(mask, values, padding_value(kind))", "pass"),
    ("sparse_ce/target.py", "if kind is None:\n                warn", "if True:\n                warn"),
    ("sparse_ce/tracing.py", "if torch._C._functorch.peek_interpreter_stack() is not None:", "if False:"),
    ("sparse_ce/reference.py", "torch.where(padding, -torch.inf, values).exp()", "values.exp()"),
    ("sparse_ce/reference.py", "slope = entries.values if a.logprobs else 1", "slope = 1"),
    ("sparse_ce/arguments.py", "self.values is None and self.indices.dim() == 1", "self.values is None"),
    ("sparse_ce/arguments.py", "behind.update(zip(behind, given[count:]))", "pass"),
    ("sparse_ce/collate.py", "for t in targets], padding_value(kind), k)", "for t in targets], 0.0, k)"),
    ("sparse_ce/collate.py", 'kind == "probs", dtype=torch.float32)', "1, dtype=torch.float32)"),
    ("sparse_ce/collate.py", "(0 not in widths or len(widths) == 1)", "True"),
    ("sparse_ce/parts.py", "(0, missing), value=padding_value(self.kind))", "(0, missing))"),
    ("sparse_ce/parts.py", 'if self.kind == "probs" else self.kind, "offsets"', ', "offsets"'),
    ("sparse_ce/rows.py", "used == 0 or len(self.shape) > 0", "True"),
    ("sparse_ce/arguments.py", ' and hasattr(t, "full_tensor"):', " and False:"),
    ("sparse_ce/arguments.py", "if part.device != device:", "if target.device != device:"),
    ("sparse_ce/arguments.py", "if inplace is not False and", "if inplace and"),
    ("sparse_ce/arguments.py", "check_inplace(options.get", "(options.get"),
    ("sparse_ce/arguments.py", "return any(size == other for other in sizes)", "return True"),
    ("sparse_ce/arguments.py", "if normalizer.is_meta and not input.is_meta:", "if False:"),
    ("sparse_ce/arguments.py", "torch.SymFloat)) and not isinstance(value, bool)", "torch.SymFloat))"),
    ("sparse_ce/arguments.py", "torch.SymInt)) and not isinstance(value, bool)", "torch.SymInt))"),
    ("sparse_ce/arguments.py", "if normalizer.numel() > 1 and not", "if False and not"),
    ("sparse_ce/arguments.py", "lambda x: 0 <= x < math.inf", "lambda x: -math.inf < x < math.inf"),
    ("sparse_ce/arguments.py", "lambda x: 0 <= x <= 1", "lambda x: 0 <= x"),
    ("sparse_ce/arguments.py", "lambda x: 0 < x < math.inf", "lambda x: 0 <= x < math.inf"),
    ("sparse_ce/arguments.py", "if not 0 < value <= vocab:", "if not 0 < value:"),
    ("sparse_ce/arguments.py", "type(value) is not type(default) or", ""),
    ("sparse_ce/arguments.py", "if weight.requires_grad:", "if False:"),
    ("sparse_ce/arguments.py", "(weight.shape[0], vocab, classes)", "(weight.shape[0], classes)"),
    ("sparse_ce/arguments.py", "return weight[:classes].to", "return weight.to"),
    ("sparse_ce/arguments.py", "if normalizer.numel() == 0:", "if False:"),
    ("sparse_ce/arguments.py", "elif not 0 <= normalizer < math.inf:", "elif not 0 <= normalizer:"),
    ("sparse_ce/arguments.py", "if not 0 <= first < math.inf:", "if not first < math.inf:"),
    ("sparse_ce/arguments.py", "_is_integer(chunk_rows) and chunk_rows > 0", "_is_integer(chunk_rows)"),
    ("sparse_ce/arguments.py", "if linear_weight.shape[0] == 0:", "if False:"),
    ("sparse_ce/arguments.py", "if second else", "if False else"),
    ("sparse_ce/arguments.py", "target.shape == shape[:1] + input.shape[2:]", "True"),
    ("sparse_ce/modules.py", "arguments.check_held(weight, normalizer, options)", "pass"),
    ("sparse_ce/masked_mean.py", "all(m == 1 or m == n for m, n", "all(m in (1, n) for m, n"),
    ("sparse_ce/ops/library.py", "if t.device != tensors[like].device:", "if False:"),
    ("sparse_ce/parallel.py", "dim %= target.dim()", "pass"),
    ("sparse_ce/parallel.py", "-target.dim() <= dim < target.dim()", "True"),
    ("sparse_ce/parallel.py", "len(parts) >= wanted", "True"),
    ("sparse_ce/parallel.py", "parts[:min(map(len, pieces.values()))]", "parts"),
    ("sparse_ce/parallel.py", "pieces[id(x)][i] if", "pieces[id(x)][0] if"),
    ("sparse_ce/parallel.py", "if not targets:", "if False:"),
    ("sparse_ce/collate.py", "ranges.append(ranges_of(t.offsets) + bases[entries])",
     "ranges.append(ranges_of(t.offsets))"),
    ("sparse_ce/collate.py", "behind_the_other([t.compact() for t in targets]", "behind_the_other(targets"),
    ("sparse_ce/collate.py", "2 if widths == {0, 1} else max(widths)", "max(widths)"),
    ("sparse_ce/entries.py", ".clamp(max=1).expand(", ".clamp(max=0).expand("),
    ("sparse_ce/entries.py", "return live if values is None else live & values.ne(padding_value(kind))", "return live"),
    ("sparse_ce/entries.py", "& (0 <= begin) & (begin <= end) & (end <= entries)", ""),
    ("sparse_ce/entries.py", "other = indices[:1].eq(0)", "other = indices[:0].eq(0)"),
    ("sparse_ce/target.py", "indices = t.detach().abs().topk(", "indices = t.detach().topk("),
    ("sparse_ce/entries.py", "return temporarily_clear_interpreter_stack()", "return nullcontext()"),
    ("sparse_ce/entries.py", "if first != 0 or last != entries or step < 0:", "if first != 0 or last != entries:"),
    ("sparse_ce/travel.py", "return _filled(x, int(widths.max()))", "return x"),
    ("sparse_ce/travel.py", "data = [_filled(x, max(", "_ = [_filled(x, max("),
    ("sparse_ce/travel.py", "sys.meta_path.insert(0, _WhenImported())", "pass"),
    ("sparse_ce/travel.py", 'setattr(module, "concatenate", concatenate_filled)', "pass"),
    ("sparse_ce/parts.py", "if shortest < 0 or first < 0 or last > entries or", "if"),
    ("sparse_ce/parts.py", "return self._select(slice(low, high), moved - low)",
     "return self._select(slice(low, high), moved)"),
    ("sparse_ce/parts.py", "begins - ends + lengths, lengths", "begins - begins, lengths"),
    ("sparse_ce/parts.py", "return self.compact(wait)._map(_alone)", "return self.compact(wait)"),
    ("sparse_ce/tracing.py", "if not eager() or type(t)", "if type(t)"),
    ("sparse_ce/collate.py", "t.ne(IGNORE_INDEX), t.num_classes, ids=True)", "None, t.num_classes, ids=True)"),
    ("sparse_ce/collate.py", "tensors[0]._dim(dim, more=1))", "0)"),
    ("sparse_ce/collate.py", "check(len(shapes) == 1, ", "check(True, "),
    ("sparse_ce/rows.py", "return rows._gathered() if repeats and", "return rows._gathered() if False and"),
    ("sparse_ce/rows.py", "k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else 1", "1"),
    ("sparse_ce/rows.py", "return k if k.dtype == torch.bool else k.long()", "return k.long()"),
    ("sparse_ce/tensorlike.py", "torch.equal(a.ne(IGNORE_INDEX), b.ne(IGNORE_INDEX))", "True"),
    ("sparse_ce/tensorlike.py", "__hash__ = object.__hash__", "__hash__ = None"),
    ("sparse_ce/tensorlike.py", "rows[i * step:(i + 1) * step]", "rows[:step]"),
    ("sparse_ce/tensorlike.py", "self[(slice(None),) * dim + (slice(end - n, end),)]", "self[end - n:end]"),
    ("sparse_ce/target.py", "crow = crow + first * columns.shape[-1]", "pass"),
    ("sparse_ce/entries.py", "last = low if low != entries else high", "last = low"),
    ("sparse_ce/sparse_softmax.py", "num_segments is None or high < num_segments", "True"),
    ("sparse_ce/sparse_softmax.py", "not bool((index[1:] < index[:-1]).any())", "True"),
]
# The integrations; only tests/test_trainer*.py run.
TRAINER = [
    ("sparse_ce/integrations/transformers.py", '(hasattr(loss, _MARK)', "(False"),
    ("sparse_ce/integrations/transformers.py", 'isinstance(inputs.get("labels"), SparseTarget)', "False"),
    ("sparse_ce/integrations/transformers.py", 'any(hasattr(m.__dict__.get("_loss_function"), _MARK)',
     "any(False"),
    ("sparse_ce/integrations/logits.py", "cap = (1.0, None) if", "cap = (1.0, None) if True or"),
    ("sparse_ce/integrations/logits.py", "self.scale * factor)", "self.scale)"),
    ("sparse_ce/integrations/logits.py", "self.scale, self.gain * factor", "self.scale, self.gain"),
    ("sparse_ce/integrations/logits.py", "linear_bias=self.bias", "linear_bias=None"),
    ("sparse_ce/integrations/logits.py", "if self.gain is not None:\n            _refuse",
     "if False:\n            _refuse"),
    ("sparse_ce/integrations/logits.py", "return Logits(hidden, weight, bias)",
     "return F.linear(hidden, weight, bias)"),
    ("sparse_ce/integrations/transformers.py", "target = target.shift(1)", "pass"),
    ("sparse_ce/integrations/transformers.py", "target.num_classes, target.kind, target.ids)", "target.num_classes)"),
    ("sparse_ce/integrations/transformers.py", "labels if shift else shift_labels", "labels"),
    ("sparse_ce/integrations/transformers.py", '{**options, "normalizer": normalizer}', "options"),
    ("sparse_ce/integrations/transformers.py", "replica.forward = MethodType(self._fused, replica)", "pass"),
    ("sparse_ce/integrations/transformers.py", "head.set_reshard_after_forward(False, recurse=False)", "pass"),
    ("sparse_ce/integrations/transformers.py", "or wanted or not", "or not"),
    ("sparse_ce/integrations/transformers.py", "head._sparse_ce_fusing = False", "pass"),
    ("sparse_ce/integrations/transformers.py", "Mapping.register(SparseTarget)", ""),
    ("sparse_ce/integrations/transformers.py", "is not nn.Linear.forward", "is None"),
    ("sparse_ce/integrations/teacher.py", "padding = padding | _repeated(indices)", "pass"),
    ("sparse_ce/integrations/teacher.py", "if mask is not None:\n            padding",
     "if False:\n            padding"),
    ("sparse_ce/integrations/teacher.py", 'if self.predicts == "next":', "if False:"),
    ("sparse_ce/integrations/teacher.py", "counts = torch.as_tensor", "_ = torch.as_tensor"),
    ("sparse_ce/integrations/teacher.py", 'if self.padding_side == "left"', "if False"),
    ("sparse_ce/parts.py", "offsets + first, 0)", "offsets, 0)"),
    ("sparse_ce/parts.py", "place - begins.gather(1, row)", "place"),
    ("sparse_ce/parts.py", "counts = offsets[..., 0] >= 0", "counts = offsets[..., 0] >= -999"),
    ("sparse_ce/parts.py", "indices = indices.masked_fill(ignored, IGNORE_INDEX)", "pass"),
    ("sparse_ce/parts.py", "part.num_classes = num_classes", "pass"),
    ("sparse_ce/parts.py", "indices.shape[-1] < 2:", "indices.shape[-1] < 1:"),
    ("sparse_ce/parts.py", " or self.by_sample:  # on its way", ":  # on its way"),
    ("sparse_ce/collate.py", "key=lambda item: isinstance(item[1], SparseTarget)", "key=lambda item: False"),
    ("sparse_ce/collate.py", "default_collate_fn_map[SparseTarget] =", "_ ="),
]


OBJECTS = ROOT / "build" / "mutants"
# The tests about a file have a word of its name in theirs, or of these; without any, of its folder's or the op's.
ABOUT = {"arguments": "errors_options_dimension", "collate": "collate_target_rows_trainer",
         "entries": "sparse_arguments_stock_target_rows", "gradient_memory": "forecast", "guarded": "zero_upstream",
         "integrations": "trainer", "live_rows": "linear", "loss_mean": "cross_entropy", "modules": "options",
         "parts": "target", "reference": "transforms_failures", "rows": "rows_target", "travel": "arrays_training"}
LATE = ("bfloat16", "compile", "limits", "memory")  # take long, and rarely find what nothing else does


class DoesNotCompile(Exception):
    """No test has noticed anything then."""


def run(command, cwd, env=None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run([str(c) for c in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", env={**os.environ, **(env or {})}, timeout=3600)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "hangs")


def build(command, cwd) -> None:
    if run(command, cwd).returncode != 0:
        raise DoesNotCompile


def included(source: Path) -> set:
    """A C++ source and what it includes of this project."""
    found, new = set(), {source.resolve()}
    while new:
        found |= new
        names = [(path.parent / name).resolve() for path in new
                 for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]
        new = {path for path in names if path.exists()} - found
    return found


def by_likelihood(mutant: tuple, tests: list) -> tuple:
    """The names of the tests that are likely to notice a mutant, the likeliest first, and all others."""
    def shared(name):
        return len(words & set(name.split("_")))

    def rank(name):
        in_text = sum(word in mutant[1] for word in name.split("_"))
        # Of all the values a kernel's mutant gets the first wrong, and one of Python mostly none.
        return any(word in name for word in LATE), -shared(name), -in_text, name.endswith("values") == python, name

    path = Path(mutant[0])
    python = path.suffix == ".py"
    words = set(ABOUT.get(path.stem, path.stem).split("_"))
    if not any(map(shared, tests)):
        words = set(ABOUT.get(path.parent.name, "cross_entropy").split("_"))
    ordered = sorted(tests, key=rank)
    return [name for name in ordered if shared(name)], [name for name in ordered if not shared(name)]


def of_programs(tree: Path, mutant: tuple) -> str:
    flavour = "tsan" if mutant[2] == "// tsan" else "plain"
    options = ["--small", "--seeds", "1", "100"] if flavour == "tsan" else ["--seeds", "1", "800"]
    for source in sorted(tree.glob("tests/emulation/*.cpp")):
        if (tree / mutant[0]).resolve() in included(source):
            build([sys.executable, "tests/emulation/build.py", flavour, source.stem], tree)
            program = f"{source.stem}_{flavour}"
            if run([f"tests/emulation/build/{program}", *options], tree).returncode != 0:
                return program
    return ""


def of_suite(tree: Path, mutant: tuple, flavours: tuple = ("plain",), pattern: str = "*", without: tuple = ()) -> str:
    """Without the test that finds the mutant's text gone."""
    names = [path.stem for path in tree.glob(f"tests/test_{pattern}.py") if path.stem not in ("test_mutants", *without)]
    for part in by_likelihood(mutant, names):
        for flavour in flavours:
            tests = [f"tests/{name}.py" for name in part if FLAVOURS[flavour].has_file(name)]
            done = run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "mutants", "-p", "no:cacheprovider", "-m",
                        "not slow", *tests], tree, {"PYTHONPATH": f"{tree / 'package'}{os.pathsep}{tree / 'tests'}",
                                                    "SPARSE_CE_FLAVOUR": flavour, "OMP_NUM_THREADS": "1"}
                       ) if tests else None
            if done and done.returncode not in (0, 5):  # 5: all that are there are slow
                said = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
                return (said or done.stdout.strip().split("\n"))[-1]
    return ""


def pytest_collection_modifyitems(items: list) -> None:
    """As a plugin of that pytest: every test with its first parameters, then every one with its second, and so on."""
    seen, turn_of = Counter(), {}
    for item in items:
        function = item.nodeid.split("[")[0]
        turn_of[item] = seen[function]
        seen[function] += 1
    items.sort(key=turn_of.__getitem__)


def compiled(tree: Path, source: Path, flags: list) -> Path:
    """The object of a source, made once for all mutants that leave it and what it includes as they are."""
    out = OBJECTS / f"{source.stem}-{digest_of(*included(source), below=tree.resolve())[:16]}.o"
    if not out.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}-{tree.parent.name}")
        build(["g++", *flags, "-c", source, "-o", part], tree)
        part.rename(out)
    return out


def of_cpu(tree: Path, mutant: tuple) -> str:
    from torch.utils.cpp_extension import include_paths, library_paths
    package = tree / "package" / "sparse_ce"
    shutil.copytree(tree / "sparse_ce", package, ignore=shutil.ignore_patterns("*.so"))
    flags = ["-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fopenmp-simd", "-fno-math-errno",
             "-fno-trapping-math", "-DTORCH_TARGET_VERSION=0x020b000000000000",
             *[f"-isystem{path}" for path in include_paths()]]
    objects = [compiled(tree, source, flags)
               for source in sorted([*tree.glob("csrc/*.cpp"), *tree.glob("csrc/cpu/*.cpp")])]
    build(["g++", "-shared", *objects, "-o", package / "_C.so", *[f"-L{path}" for path in library_paths()],
           "-ltorch_cpu", "-lc10"], tree)
    of_this_library = [name for name in others() if FLAVOURS[name].environment and not FLAVOURS[name].build]
    return of_suite(tree, mutant, ("plain", *of_this_library))


def of_python(tree: Path, mutant: tuple, pattern: str = "*") -> str:
    """Without what compiles C++."""
    import sparse_ce
    package = tree / "package" / "sparse_ce"
    shutil.copytree(tree / "sparse_ce", package)
    for library in Path(sparse_ce.__file__).parent.glob("_C*.so"):
        shutil.copy(library, package)
    return of_suite(tree, mutant, pattern=pattern, without=("test_native_kernels",))


def of_trainer(tree: Path, mutant: tuple) -> str:
    return of_python(tree, mutant, "trainer*")


# What finds the test that notices a mutant in a tree of files: "" where none does.
GROUPS = {"cuda": (CUDA, of_programs), "cpu": (CPU, of_cpu), "python": (PYTHON, of_python),
          "trainer": (TRAINER, of_trainer)}


def problems() -> list:
    """The mutants whose text does not occur exactly once: nothing, or more than was meant, would be changed."""
    counts = [(group, file, text, (ROOT / file).read_text().count(text) if (ROOT / file).exists() else 0)
              for group, (mutants, _) in GROUPS.items() for file, text, _ in mutants]
    return [f"{group}: {file} has {text!r} {count} times" for group, file, text, count in counts if count != 1]


def chosen(words: list) -> list:
    """(search, mutant) for each that fits the words."""
    groups = [word for word in words if word in GROUPS] or list(GROUPS)
    parts = [word for word in words if word not in GROUPS]
    return [(search, mutant) for group in groups for mutants, search in [GROUPS[group]] for mutant in mutants
            if not parts or any(part in mutant[0] or part in mutant[1] for part in parts)]


def try_out(search, mutant: tuple) -> str:
    file, text, replacement = mutant
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "out"))
        source = (tree / file).read_text()
        (tree / file).write_text(source.replace(text, replacement))
        try:
            test = search(tree, mutant)
            said = "caught" if test else "SURVIVED"
        except DoesNotCompile:
            test, said = "", "INVALID"
    print(f"{said:8}", file, "|", text.split("\n")[0][:90], f"| {test[:90]}" if test else "", flush=True)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many mutants at once")
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"{', '.join(GROUPS)}, or a part of a file or text")
    arguments = parser.parse_args()
    if problems():
        sys.exit("\n".join(problems()))
    mutants = chosen(arguments.words)
    if not mutants:
        sys.exit(f"no mutant fits {arguments.words}")
    with ThreadPoolExecutor(arguments.j) as pool:
        said = list(pool.map(lambda pair: try_out(*pair), mutants))
    print(f"{said.count('caught')} caught, {said.count('SURVIVED')} survived, {said.count('INVALID')} do not compile")
    return said.count("caught") != len(said)


if __name__ == "__main__":
    sys.exit(main())
