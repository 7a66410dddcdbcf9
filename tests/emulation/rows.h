// rows.h - Draws random rows of logits with sparse targets in every format, on host and device.
#pragma once

#include "harness.h"

#include "../../csrc/ops/cross_entropy.h"

#include <algorithm>

namespace sparse_ce {
namespace {

struct Case {
  DType dtype, arithmetic;
  int64_t rows, vocab, num_classes, row_stride, offset;
  enum Layout { kIndex, kTopK, kOffsets, kRanges } layout;
  int64_t width;
  bool has_values, logprobs, has_weight, has_mask, has_grad_lse, in_place, unit_stride_grad, ties;
  Reads reads;
  bool many_rows;
  LossOptions options;
  int64_t max_blocks;
  double logit_size, shift;
  double lead;  // of a class over the others in some rows; 0 means that there are no such rows
  StridedRows strided;  // `inner` is 0 if rows are packed

  // Returns the position of row r's class v in the logits.
  int64_t at(int64_t r, int64_t v) const {
    return strided.inner ? r / strided.inner * strided.outer_stride + r % strided.inner + v * strided.column_stride
                         : r * row_stride + v;
  }
  int64_t logits_count() const { return rows ? at(rows - 1, vocab - 1) + 1 : 0; }
  std::string text() const {
    char out[512];
    std::snprintf(
        out, sizeof(out),
        "dtype %d rows %ld vocab %ld classes %ld stride %ld offset %ld layout %d width %ld values %d "
        "logprobs %d weight %d "
        "mask %d grad_lse %d in_place %d smoothing %g z_loss %g scale %g softcap %g max_blocks %ld inner %ld lead %g",
        int(dtype), long(rows), long(vocab), long(num_classes), long(row_stride), long(offset), int(layout),
        long(width), has_values, logprobs, has_weight, has_mask, has_grad_lse, in_place, options.label_smoothing,
        options.z_loss, options.logit_scale, options.softcap, long(max_blocks), long(strided.inner), lead);
    return out;
  }
};

Case draw(bool small) {
  Case c{};
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kBFloat16});
  c.arithmetic = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  // Cases for a warp per row, a block per row, and several blocks per row.
  switch (below(small ? 8 : 6)) {
    case 0:
      c.vocab = small ? 4200 + below(9) : one_of<int64_t>({4099, 4500, 9001});
      c.rows = 1 + below(5);
      break;
    case 1:
      c.vocab = small ? one_of<int64_t>({20000, 33000}) : one_of<int64_t>({16392, 33001, 50257, 70003});
      c.rows = 1 + below(small ? 1 : 3);
      break;
    default:
      c.vocab = one_of<int64_t>({1, 7, 8, 31, 33, 257, 513, 600, 1000});
      c.rows = below(small ? 12 : 40);
  }
  c.num_classes = chance(0.2) ? 1 + below(c.vocab) : c.vocab;
  c.row_stride = c.vocab + (chance(0.3) ? below(20) : 0);
  c.offset = chance(0.3) ? below(9) : 0;
  c.layout = Case::Layout(below(4));
  c.width = c.layout == Case::kIndex ? 1 : one_of<int64_t>({0, 1, 2, 3, 8, 40, 90});
  // More entries than fit into the tables of a warp and of a block.
  const bool block = c.vocab > 4000;
  if (c.layout != Case::kIndex && chance(block ? 0.5 : 0.2)) {
    c.width = block ? one_of<int64_t>({65, 2048, 2300, 3000, 10000}) : one_of<int64_t>({65, 256, 257, 1000});
    c.rows = std::min<int64_t>(c.rows, c.width < 1000 ? 9 : c.width < 10000 ? 3 : 1);
  }
  c.has_values = c.layout != Case::kIndex && chance(0.8);
  c.logprobs = c.has_values && chance(0.4);
  c.has_weight = chance(0.3), c.has_mask = chance(0.3), c.has_grad_lse = chance(0.3), c.in_place = chance(0.4);
  c.unit_stride_grad = chance(0.6);
  if (chance(0.3)) c.options.label_smoothing = uniform(0.01, 0.5);
  if (chance(0.3)) c.options.z_loss = uniform(1e-4, 0.1);
  if (chance(0.2)) c.options.logit_scale = uniform(0.3, 1.5);
  if (chance(0.2)) c.options.softcap = uniform(3, 30);
  c.max_blocks = chance(0.4) ? 1 + below(3) : 0;
  c.logit_size = one_of<double>({1, 5, 12});
  c.shift = chance(0.3) ? one_of<double>({-1000, -100, 100, 1000}) : 0;
  c.lead = chance(0.3) ? uniform(0, 80) : 0;
  return c;
}

constexpr int64_t kIgnore = -100;

// Holds the data of a case. `indices`, `values` and `ranges` also describe each row's entries to the reference.
struct Problem {
  const Case& c;
  std::vector<int64_t> begin, end;
  Array logits, indices, values, offsets, weight, weight_sum, grad_loss, grad_lse;
  std::vector<char> mask, outside;  // of rows; outside: its offsets lie outside the entries
  bool* device_mask = nullptr;

  static int64_t entries_of(const Case& c) { return c.layout == Case::kIndex ? c.rows : c.rows * c.width; }
  explicit Problem(const Case& c)
      : c(c), begin(c.rows), end(c.rows), logits(c.dtype, c.logits_count(), c.offset),
        indices(chance(0.5) ? DType::kInt64 : DType::kInt32, entries_of(c)),
        values(one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}), entries_of(c)),
        offsets(chance(0.5) ? DType::kInt64 : DType::kInt32, c.layout == Case::kRanges ? 2 * c.rows : c.rows + 1),
        weight(c.arithmetic, c.num_classes), weight_sum(c.arithmetic, 1),
        grad_loss(c.arithmetic, c.unit_stride_grad ? c.rows : 1), grad_lse(c.arithmetic, c.rows),
        mask(size_t(c.rows), 1), outside(size_t(c.rows), 0) {
    const double nan = std::nan(""), inf = INFINITY;
    for (int64_t i = 0; i < logits.count(); ++i) {
      logits.set(i, chance(0.02) ? -inf : c.shift + uniform(-c.logit_size, c.logit_size));
      if (c.ties) logits.set(i, std::round(logits.get(i)));
    }
    double sum = 0;
    for (int64_t v = 0; v < c.num_classes; ++v) {
      weight.set(v, chance(0.1) ? 0 : uniform(0, 2));
      sum += weight.get(v);
    }
    weight_sum.set(0, sum);
    fill_entries();
    for (int64_t r = 0; r < c.rows; ++r) {
      if (c.has_mask) mask[size_t(r)] = !chance(0.3);
      grad_lse.set(r, uniform(-1, 1));
      if (c.unit_stride_grad || r == 0) grad_loss.set(r, chance(0.2) ? 0 : uniform(-2, 2));
      if (ignored(r) && chance(0.5))  // the contents of an ignored row must not matter
        for (int64_t v = 0; v < c.vocab; ++v) logits.set(c.at(r, v), chance(0.5) ? nan : inf);
      else if (chance(0.2))  // nor must columns beyond the classes
        for (int64_t v = c.num_classes; v < c.vocab; ++v) logits.set(c.at(r, v), nan);
      if (chance(0.05))  // a row that begins with only -inf
        for (int64_t v = 0; v + 1 < c.num_classes; ++v) logits.set(c.at(r, v), -inf);
      if (c.lead > 0 && chance(0.7)) give_lead(r);
    }
    for (Array* a : {&logits, &indices, &values, &offsets, &weight, &weight_sum, &grad_loss, &grad_lse}) a->upload();
    if (c.rows > 0) {
      must(cudaMalloc(reinterpret_cast<void**>(&device_mask), size_t(c.rows)), "malloc");
      must(cudaMemcpy(device_mask, mask.data(), size_t(c.rows), cudaMemcpyHostToDevice), "upload");
    }
  }
  ~Problem() {
    if (device_mask) cudaFree(device_mask);
  }

  void fill_entries() {
    const int64_t n = indices.count();
    for (int64_t i = 0; i < n; ++i) {
      // Few classes cause duplicates; sometimes a row is sorted, as in CSR.
      indices.set(i, double(chance(0.3) ? below(std::min<int64_t>(c.num_classes, 4)) : below(c.num_classes)));
      values.set(i, c.logprobs ? uniform(-8, 0.5) : chance(0.1) ? uniform(-1, 0) : uniform(0, 1));
      if (c.logprobs && chance(0.1)) values.set(i, -uniform(80, 120));  // subnormal or 0 in float32
      if (c.layout == Case::kIndex ? chance(0.2) : chance(0.1)) indices.set(i, double(kIgnore));
      if (c.has_values && chance(0.1)) {  // padding has any index and weight 0
        values.set(i, c.logprobs ? -INFINITY : 0);
        indices.set(i, double(one_of<int64_t>({-1, 0, c.num_classes, 2000000000, kIgnore})));
      }
      if (chance(0.002)) indices.set(i, double(one_of<int64_t>({-1, c.num_classes, 2147483647})));
    }
    int64_t position = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      int64_t length = c.layout == Case::kIndex ? 1 : c.width;
      if (c.layout == Case::kOffsets || c.layout == Case::kRanges) length = below(c.width + 1);
      begin[r] = position;
      end[r] = position += length;
      if (chance(0.3)) sort_row(r);
      if (c.layout == Case::kTopK && chance(0.1))
        for (int64_t i = begin[r]; i < end[r]; ++i) indices.set(i, double(kIgnore));
      if (c.layout == Case::kOffsets) offsets.set(r, double(begin[r])), offsets.set(r + 1, double(end[r]));
      if (c.layout == Case::kRanges) offsets.set(2 * r, double(begin[r])), offsets.set(2 * r + 1, double(end[r]));
    }
    if (c.layout == Case::kOffsets && c.rows == 0) offsets.set(0, 0);
  }
  // Makes the class of an entry, or any other, the most probable one of a row.
  void give_lead(int64_t r) {
    int64_t to = below(c.num_classes);
    if (begin[r] < end[r] && chance(0.7)) {
      const int64_t column = int64_t(indices.get(begin[r] + below(end[r] - begin[r])));
      if (0 <= column && column < c.num_classes) to = column;
    }
    double max = -INFINITY;
    for (int64_t v = 0; v < c.num_classes; ++v)
      if (v != to) max = std::fmax(max, logits.get(c.at(r, v)));
    if (std::isfinite(max)) logits.set(c.at(r, to), max + c.lead);
  }
  void sort_row(int64_t r) {
    std::vector<std::pair<int64_t, double>> row;
    for (int64_t i = begin[r]; i < end[r]; ++i) row.push_back({int64_t(indices.get(i)), values.get(i)});
    std::sort(row.begin(), row.end());
    for (int64_t i = begin[r]; i < end[r]; ++i) {
      indices.set(i, double(row[size_t(i - begin[r])].first));
      values.set(i, row[size_t(i - begin[r])].second);
    }
  }
  // Makes the range exceed the entries: such a row has no entries and a mass of NaN.
  void lead_outside(int64_t r) {
    outside[size_t(r)] = 1;
    offsets.set(2 * r + 1, double(indices.count() + 1)), offsets.upload();
    end[size_t(r)] = begin[size_t(r)];
  }
  bool ignored(int64_t r) const {
    if (c.has_mask && !mask[size_t(r)]) return true;
    if (c.layout == Case::kOffsets || c.layout == Case::kRanges || begin[r] == end[r]) return false;
    for (int64_t i = begin[r]; i < end[r]; ++i)
      if (int64_t(indices.get(i)) != kIgnore) return false;
    return true;
  }
  // Returns the weight in the arithmetic dtype, in which it may underflow.
  double value_of(int64_t i) const {
    if (!c.logprobs) return c.has_values ? values.get(i) : 1.0;
    const double w = std::exp(values.get(i));
    return c.arithmetic == DType::kFloat32 ? double(float(w)) : w;
  }
  bool padding(int64_t i) const { return c.has_values && values.get(i) == (c.logprobs ? -INFINITY : 0.0); }
  double weight_of(int64_t v) const { return c.has_weight ? weight.get(v) : 1.0; }
  double grad_of(int64_t r) const { return grad_loss.get(c.unit_stride_grad ? r : 0); }
  // Returns the weight of an active row in a mean.
  double count_of(int64_t r) const {
    const int64_t label = c.layout == Case::kIndex ? int64_t(indices.get(r)) : -1;
    return 0 <= label && label < c.num_classes ? weight_of(label) : 1;
  }

  void fill(CrossEntropyArgs& args) const {
    args.logits = logits.device();
    args.dtype = c.dtype;
    args.rows = c.rows, args.vocab = c.vocab, args.row_stride = c.row_stride;
    args.strided = c.strided;
    args.options = c.options;
    args.max_blocks = c.max_blocks;
    args.reads = c.reads, args.planned_rows = c.many_rows ? int64_t(1) << 30 : 0;
    args.weight_sum = c.has_weight ? weight_sum.device() : nullptr;
    TargetView& t = args.target;
    t = TargetView{};
    t.indices = indices.device(), t.indices_dtype = indices.dtype();
    t.values = c.has_values ? values.device() : nullptr, t.values_dtype = values.dtype();
    t.logprobs = c.logprobs, t.labels = c.layout == Case::kIndex;
    t.offsets = c.layout == Case::kOffsets || c.layout == Case::kRanges ? offsets.device() : nullptr;
    t.offsets_dtype = offsets.dtype(), t.offsets_step = c.layout == Case::kRanges ? 2 : 1;
    t.row_mask = c.has_mask ? device_mask : nullptr;
    t.weight = c.has_weight ? weight.device() : nullptr;
    t.rows = c.rows, t.entries = indices.count(), t.width = c.width;
    t.num_classes = c.num_classes, t.ignore_index = kIgnore;
  }
};

}  // namespace
}  // namespace sparse_ce
