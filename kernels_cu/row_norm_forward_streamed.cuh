// SPDX-License-Identifier: MIT
// Row norms, forward, for streamed rows: on a GPU rows too long for the team's registers, on a CPU
// all rows. The first pass finds the factors, chunk by chunk. The second pass reads the row again,
// on a GPU backwards, and writes y.
//
// The shift of a centered row is the mean of its first chunk. If the shift is more than half a
// standard deviation from the row's mean, the first pass is repeated with a better shift.
#pragma once
#include "streamed.cuh"

template <class B>
struct StreamedForwardRow : ForwardRow<B> {
  RowScale<B> scale;
  RowPacks<B, typename B::stream_t> stream;  // s, which the second pass reads
  HeldPacks<B, PackOfP<B>> p;

  __device__ StreamedForwardRow(const Arguments<B>& arguments, const StreamedRow<B>& row)
      : ForwardRow<B>(arguments, row),
        scale(arguments, row),
        stream([&] {
          if constexpr (B::writes_stream)
            return this->residual_out;
          else
            return row.of(arguments.x);
        }()),
        p(row) {}

  // Calls visit(at, y) for each pack of a chunk that the first pass has seen.
  template <class Chunk, class Visit>
  __device__ void for_each_y(const Chunk& chunk, const Visit& visit) {
    stream.load(chunk);
    if constexpr (!B::branch_gate) this->gate.load(chunk);
    this->parameters.load(chunk);
    chunk.for_each_pack([&](auto at) {
      const auto s = stream[at];
      auto y = this->make_y(at, p.held_or(at, [&] { return this->make_p(at, s); }));
      visit(at, y);
    });
  }
};

template <class B>
__device__ inline StreamedForwardRow<B> first_pass(const Arguments<B>& arguments, Team<B>& team,
                                                   const StreamedRow<B>& place) {
  using C = typename B::compute_t;
  StreamedForwardRow<B> row(arguments, place);
  const C width = C(row_width(arguments));

  // These visit the items of p: load_and_visit in a new chunk, visit_loaded in the chunk that was
  // loaded last, reload_and_visit in a chunk whose s is loaded again.
  const auto visit_pack = [&](auto at, const auto& visit) {
    const auto& pack = row.p[at];
    for_each_item<B>(at, [&](auto item) { visit(item, read<B>(pack, item)); });
  };
  const auto load_and_visit = [&](const auto& chunk, const auto& visit) {
    row.x.load(chunk);
    row.residual.load(chunk);
    if constexpr (B::pre_gate || B::branch_gate) row.gate.load(chunk);
    chunk.for_each_pack([&](auto at) {
      row.p.put(at, row.make_p(at, row.make_stream(at)));
      visit_pack(at, visit);
    });
  };
  const auto visit_loaded = [&](const auto& chunk, const auto& visit) {
    chunk.for_each_pack([&](auto at) { visit_pack(at, visit); });
  };
  const auto reload_and_visit = [&](const auto& chunk, const auto& visit) {
    row.stream.load(chunk);
    if constexpr (B::pre_gate) row.gate.load(chunk);
    chunk.for_each_pack([&](auto at) {
      row.p.put(at, row.make_p(at, row.stream[at]));
      visit_pack(at, visit);
    });
  };

  if constexpr (!B::center) {
    RowSum<B> squares;
    place.for_each_chunk([&](const auto& chunk) {
      ItemSums<B> sums;
      load_and_visit(chunk, [&](auto item, auto v) { sums.add_product(item, v, v); });
      squares.add(sums);
    });
    row.variance = math::divided(team.all_reduce(squares).item[0], width);
  } else {
    RowSum<B> first_sum, sum_t, sum_tt;
    C shift = 0;
    const auto add_chunk = [&](const auto& chunk, const auto& visit_chunk) {
      ItemSums<B> t_sums, tt_sums;
      visit_chunk(chunk, [&](auto item, auto v) {
        const auto t = clear_outside<B>(v - shift, item);  // v - shift is not 0 outside the row
        t_sums.add(item, t);
        tt_sums.add_product(item, t, t);
      });
      sum_t.add(t_sums);
      sum_tt.add(tt_sums);
    };
    place.with_first_chunk([&](const auto& chunk) {
      ItemSums<B> sums;
      load_and_visit(chunk, [&](auto item, auto v) { sums.add(item, v); });
      first_sum.add(sums);
      shift = math::divided(team.all_reduce(first_sum).item[0], C(place.first_width()));
      add_chunk(chunk, visit_loaded);
    });
    place.for_each_next_chunk([&](const auto& chunk) { add_chunk(chunk, load_and_visit); });
    row.find_moments(team.all_reduce(sum_t, sum_tt), width);

    if (4 * row.correction * row.correction > row.variance) {
      shift += row.correction;
      sum_t = {};
      sum_tt = {};
      place.for_each_chunk([&](const auto& chunk) { add_chunk(chunk, reload_and_visit); });
      row.find_moments(team.all_reduce(sum_t, sum_tt), width);
    }
    row.shift = shift;
  }
  row.find_factors(arguments, place, team.thread() == 0);
  return row;
}

// Finds the scale of the row's q.
template <class B>
__device__ inline void find_scale(Team<B>& team, StreamedForwardRow<B>& row,
                                  const StreamedRow<B>& place) {
  RowReduction<B, Max> largest;
  place.for_each_chunk([&](const auto& chunk) {
    Magnitudes<B> of_chunk;
    row.for_each_y(chunk, [&](auto at, const auto& y) { of_chunk.add(at, y); });
    largest.add(of_chunk);
  });
  row.scale.find(team.all_reduce(largest).item[0], place.exists && team.thread() == 0);
}

template <class B>
__device__ inline void normalize_streamed(const Arguments<B>& arguments, Team<B>& team,
                                          const Walk<B>& walk) {
  for_each_row(
      walk,
      [&](const StreamedRow<B>& place) {
        if constexpr (B::given_statistics) {
          StreamedForwardRow<B> row(arguments, place);
          row.take_factors(arguments, place);
          return row;
        } else {
          auto row = first_pass(arguments, team, place);
          if constexpr (B::scales_rows) find_scale(team, row, place);
          return row;
        }
      },
      [&](auto& row, const StreamedRow<B>& place) {
        if constexpr (!B::finds_moments) {
          ChunkResults<B> results(arguments, place, row.scale);
          place.for_each_chunk_in_second_pass([&](const auto& chunk) {
            results.begin(chunk);
            row.for_each_y(chunk, [&](auto at, auto& y) { results.put(at, y); });
            results.store(chunk);
          });
        }
      });
}
