#include "strided_rows.h"

#include "row_entries.h"
#include "row_loops.h"
#include "strided_streams.h"

#include <memory>
#include <vector>

namespace sparse_ce {
namespace cpu {
namespace {

// Divides the rows into blocks. The result of a row does not depend on its block.
struct Grid {
  int64_t inner, rows;  // of a block
  int64_t per_image, blocks;
  bool stored;            // true if all z of a block are stored at once, false if none are

  Grid(const CrossEntropyArgs& args, int64_t element_size) : inner(args.strided.inner) {
    const int64_t images = args.rows / inner, threads = torch::stable::get_num_threads();
    const int64_t columns = args.target.num_classes, fit = kBlockBytes / (columns * element_size);
    const int64_t most = fit < kLeastRows ? kMostRows : std::min(fit, kMostRows);
    per_image = std::max(divide_up(inner, most), std::min(divide_up(threads, images), inner / kLeastRows));
    rows = std::min(most, divide_up(divide_up(inner, per_image), 16) * 16);
    blocks = images * per_image;
    stored = fit >= kLeastRows;
  }
  int64_t first(int64_t block) const { return block / per_image * inner + block % per_image * rows; }
  int64_t size(int64_t block) const { return std::min(rows, inner - block % per_image * rows); }
};

// Holds the memory of a thread and runs its passes over a block of rows [first, first + n).
template <typename scalar_t>
class Block {
  using acc_t = acc_type<scalar_t>;
  using WithSlope = typename LogitTransform<acc_t>::WithSlope;

 public:
  Block(const CrossEntropyArgs& args, const Grid& grid)
      : args_(args), grid_(grid), columns_(args.target.num_classes),
        class_weight_(static_cast<const acc_t*>(args.target.weight)), rows_(new BlockRows<acc_t>) {
    if (!grid.stored) return;
    z_.reset(new acc_t[static_cast<size_t>(grid.rows * columns_)]);
    maxima_.reset(new acc_t[static_cast<size_t>((divide_up(columns_, kColumns) + 1) * kMostRows)]);
  }

  void take(int64_t block) {
    first_ = grid_.first(block), n_ = grid_.size(block);
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t r = (first_ + i) * args_.row_scale_stride;
      rows_->scale[i] = args_.row_scale ? static_cast<const acc_t*>(args_.row_scale)[r] : acc_t(1);
    }
  }

  void forward(const ForwardArgs& args) {
    std::fill_n(rows_->max, n_, RowStats<acc_t>().max);
    std::fill_n(rows_->rest, n_, RowStats<acc_t>().rest);
    std::fill_n(rows_->weighted, n_, acc_t(0));
    rows_->weight = 0;
    if (grid_.stored) load(view(0), max_of(0));
    for (int64_t c = 0; c < columns_; c += kColumns)
      with_instruction_set([&](auto set) SCE_INLINE {
        if (!grid_.stored)
          return stream_columns<decltype(set)::value>(view(c), args_.options, scaled(), class_weight_, *rows_);
        push_columns<decltype(set)::value>(view(c), max_of(c), view(c + kColumns), max_of(c + kColumns), args_.options,
                                           scaled(), class_weight_, keeps(), *rows_);
      });
    cap_labels(args, [&](int64_t r) { return args.target.ignored(r); });
    for (int64_t i = 0; i < n_; ++i) finish(args, i);
  }

  // `ready` means that forward has already stored what the gradient needs.
  void backward(const BackwardArgs& args, bool ready) {
    at_entries_.clear();
    cap_labels(args, [&](int64_t r) { return args.without_gradient<acc_t>(r); });
    for (int64_t i = 0; i < n_; ++i) plan(args, i);
    scalar_t* const gradient = args.strided_gradient_row<scalar_t>(first_).first;
    const Destination<scalar_t> to{gradient, nontemporal(args)};
    const int64_t step = args.grad_strided.column_stride, apart = args.grad_strided.inner_stride;
    for (int64_t c = 0; c < columns_; c += kColumns) {
      if (grid_.stored && !ready) make(c);
      with_instruction_set([&](auto set) SCE_INLINE {
        if (!grid_.stored)
          return differentiate_columns<decltype(set)::value>(view(c), args.options, scaled(), class_weight_, *rows_, to,
                                                             step, apart);
        write_columns<decltype(set)::value>(view(c), max_of(c), args.options, class_weight_, *rows_, to, step, apart);
      });
    }
    for (int64_t c = columns_; c < args.vocab; ++c)
      for (int64_t i = 0; i < n_; ++i) from_acc(acc_t(0), gradient[c * step + i * apart]);
    for (const auto& [at, value] : at_entries_) from_acc(value, gradient[at]);
  }

 private:
  struct AtEntry {
    int64_t at;  // relative to the gradient of the block's first row and class
    acc_t value;
  };

  // Returns true if the gradient of the planned block uses non-temporal stores.
  bool nontemporal(const BackwardArgs& args) const {
    return use_nontemporal(args.logits, args.grad_logits, args.rows * args.vocab, sizeof(scalar_t)) &&
           worth_it<scalar_t>(n_ * args.vocab, at_entries_.size());
  }

  bool scaled() const { return args_.row_scale != nullptr; }

  // Returns the existing columns in [begin, begin + kColumns).
  BlockColumns<scalar_t> view(int64_t begin) const {
    return {args_.strided_row<scalar_t>(first_).first,
            args_.strided.column_stride,
            args_.strided.inner_stride,
            n_,
            begin,
            std::min(begin + kColumns, columns_),
            columns_,
            z_ ? z_.get() + begin * grid_.rows : nullptr,
            grid_.rows};
  }

  // Returns true if exponentials replace z.
  bool keeps() const { return args_.options.softcap == 0; }

  // Returns the maxima of the columns from `begin` on.
  acc_t* max_of(int64_t begin) const { return maxima_.get() + begin / kColumns * kMostRows; }

  // Computes the input of the gradient for the columns from `begin` on.
  void make(int64_t begin) {
    load(view(begin), max_of(begin));
    if (args_.options.softcap != 0) return;
    with_instruction_set([&](auto set) SCE_INLINE {
      alignas(64) acc_t sum[kMostRows] = {}, ties[kMostRows] = {};
      raise_columns<decltype(set)::value>(view(begin), max_of(begin), /*in_place=*/true, sum, ties,
                                          [](auto, int64_t) SCE_INLINE {});
    });
  }

  void load(const BlockColumns<scalar_t>& columns, acc_t* max) {
    with_instruction_set([&](auto set) SCE_INLINE {
      load_columns<decltype(set)::value>(columns, args_.options, scaled(), *rows_, max);
    });
  }

  LogitTransform<acc_t> transform(int64_t i) const { return LogitTransform<acc_t>(args_.options, rows_->scale[i]); }
  acc_t logit(int64_t i, int64_t column) const { return to_acc(args_.strided_row<scalar_t>(first_ + i)[column]); }

  // Adds the entries and writes the outputs of row i.
  void finish(const ForwardArgs& args, int64_t i) const {
    const int64_t r = first_ + i;
    const RowStats<acc_t> stats = rows_->stats(i);
    TargetSums<WideSum> sums;
    const bool ignored = args.target.ignored(r);
    if (!ignored) {
      const EntryRange range = args.target.row(r);
      const bool capped = caps_columns(args.options, scaled()), single = range.end - range.begin == 1;
      for (int64_t k = range.begin; k < range.end; ++k) {
        const auto entry = args.target.entry<acc_t>(k);  // out-of-range indices were rejected before
        if (entry.column < 0) continue;
        sums.add(args.target.share(entry), stats.max, [&] {
          if (capped && single) return labels_z_[i];
          const acc_t x = logit(i, entry.column);
          return capped ? Tile<acc_t>::transformed(x, transform(i)) : transform(i)(x);
        });
      }
    }
    args.write(r, ignored, stats, sums.template stats<acc_t>());
  }

  // Computes the coefficients of row i and the gradient at its entries, from logits that the dense pass may overwrite.
  // The gradient is rounded to storage once, so p - 1 with p close to 1 keeps its digits in 16 bits.
  void plan(const BackwardArgs& args, int64_t i) {
    const int64_t r = first_ + i;
    const bool zero = args.without_gradient<acc_t>(r);
    rows_->active[i] = zero ? acc_t(0) : acc_t(1);
    if (zero) return set(i, {0, 0, 0, 0, 0});
    const auto t = transform(i);
    const int64_t step = args.grad_strided.column_stride, at_row = i * args.grad_strided.inner_stride;
    const EntryRange range = args.target.row(r);
    if (range.end - range.begin == 1) {  // most rows of most targets
      const auto entry = args.target.entry<acc_t>(range.begin);
      const acc_t w = entry.column < 0 ? acc_t(0) : args.target.share(entry);
      const GradientCoefficients<acc_t> c = args.coefficients(r, w);
      set(i, c);
      if (entry.column < 0) return;
      const auto [z, of_cap] =
          labels_z_.empty() ? t.with_slope(logit(i, entry.column)) : WithSlope{labels_z_[i], labels_slopes_[i]};
      const acc_t o = args.target.class_weight<acc_t>(entry.column);
      return at_entries_.push_back({entry.column * step + at_row, c.at(z, o, w) * (t.scale * of_cap)});
    }
    entries_.collect(args.target, r);
    const GradientCoefficients<acc_t> c = args.coefficients(r, entries_.mass());
    set(i, c);
    entries_.arrange(args, 1);
    entries_.gather(args.strided_row<scalar_t>(r), 0, entries_.size());
    Tile<scalar_t>::entries(entries_.logits.data(), entries_.size(), t, c,
                            entries_.class_weights.empty() ? nullptr : entries_.class_weights.data(),
                            entries_.weights.data(), entries_.elsewhere);
    for (size_t k = 0; k < entries_.size(); ++k)
      at_entries_.push_back({entries_.columns[k] * step + at_row, entries_.logits[k]});
  }

  // Computes z and dz/d(scale x) for all rows with one entry at once, bitwise equal to the dense passes.
  template <typename skips_t>
  void cap_labels(const CrossEntropyArgs& args, const skips_t& skips) {
    if (!caps_columns(args.options, scaled())) return;
    labels_z_.assign(n_, acc_t(0));
    labels_slopes_.resize(n_);
    for (int64_t i = 0; i < n_; ++i) {
      const EntryRange range = args.target.row(first_ + i);
      if (range.end - range.begin != 1 || skips(first_ + i)) continue;
      const int64_t column = args.target.entry<acc_t>(range.begin).column;
      if (column >= 0) labels_z_[i] = logit(i, column);
    }
    Tile<acc_t>::transform(labels_z_.data(), n_, transform(0), labels_z_.data(), labels_slopes_.data());
  }

  void set(int64_t i, const GradientCoefficients<acc_t>& c) {
    rows_->a[i] = c.a, rows_->b[i] = c.b;
    rows_->lse[i] = c.lse, rows_->lse_residual[i] = c.lse_residual;
  }

  const CrossEntropyArgs& args_;
  const Grid& grid_;
  const int64_t columns_;
  const acc_t* class_weight_;
  int64_t first_ = 0, n_ = 0;
  std::unique_ptr<acc_t[]> z_, maxima_;
  std::unique_ptr<BlockRows<acc_t>> rows_;
  std::vector<AtEntry> at_entries_;
  RowEntries<acc_t> entries_;
  std::vector<acc_t> labels_z_, labels_slopes_;
};

// Calls f(Block<scalar_t>&) for every block of rows.
template <typename function_t>
void for_blocks(const CrossEntropyArgs& args, const function_t& f) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    const Grid grid(args, sizeof(acc_type<scalar_t>));
    parallel_rows(grid.blocks, grid.rows * args.vocab, [&](int64_t begin, int64_t end) {
      Block<scalar_t> block(args, grid);
      for (int64_t b = begin; b < end; ++b) {
        block.take(b);
        f(block);
      }
    });
  });
}

}  // namespace

void strided_forward(const ForwardArgs& args) {
  for_blocks(args, [&](auto& block) { block.forward(args); });
}

void strided_forward_with_gradient(const ForwardArgs& forward, const BackwardArgs& backward) {
  for_blocks(forward, [&](auto& block) {
    block.forward(forward);
    block.backward(backward, true);
  });
}

void strided_backward(const BackwardArgs& args) {
  for_blocks(args, [&](auto& block) { block.backward(args, false); });
}

void strided_backward_values(const BackwardArgs& args) {
  with_storage(args.dtype, [&](auto storage) {
    using scalar_t = decltype(storage);
    using acc_t = acc_type<scalar_t>;
    parallel_rows(args.rows, args.target.entries / std::max<int64_t>(1, args.rows), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (args.target.ignored(r)) continue;
        const GradientCoefficients<acc_t> c = args.template coefficients<acc_t>(r, acc_t(0));
        const auto transform = args.template transform<acc_t>(r);
        const EntryRange range = args.target.row(r);
        for (int64_t i = range.begin; i < range.end; ++i)
          args.write_value(i, args.template strided_row<scalar_t>(r), transform, c);
      }
    });
  });
}

}  // namespace cpu
}  // namespace sparse_ce
