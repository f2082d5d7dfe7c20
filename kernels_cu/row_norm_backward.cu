// SPDX-License-Identifier: MIT
// Row norms, backward: dx, the residual stream's gradient, dgate, and sums for dweight and dbias,
// in one kernel. x is what was normalised, which the forward calls s.
//
//   p       = x * g(gate)    if pre-gate, else x
//   r       = (p - mean) * rstd                                            mean only if center
//   n       = k * r * (weight + weight_offset) + bias
//   dn      = dy * g(gate)   if post-gate, else dy
//   dr      = k * dn * (weight + weight_offset)
//   dp      = rstd * (dr - r * mean(r * dr) - mean(dr))                    mean(dr) only if center
//   ds      = (dp * g(gate)  if pre-gate, else dp) + dresidual_out
//   dx      = ds * g(gate)   if the gate is on the branch, else ds;        dresidual = ds
//   dgate   = g'(gate) * dp * x    if pre-gate;    g'(gate) * dy * n    if post-gate;
//             g'(gate) * ds * branch               if the gate is on the branch
//   dweight = sum over rows of dn * k * r
//   dbias   = sum over rows of dn
//
// The saved mean is rounded, so its error is measured and removed (see the forward):
//   correction  = mean(p - mean)
//   sum(r * dr) = rstd * (sum((p - mean) * dr) - correction * sum(dr))
//
// For rows that are split over devices, one build finds sum(dr) and sum(r * dr), both without k, in
// place of gradients. Another build is given these sums over whole rows of `count` elements. Both
// are given the correction, because it is that of whole rows.
//
// The rows that share weight and bias are a segment; each segment has sums of its own. If each row
// has its own weight or bias, the kernel writes the gradient itself.
//
// Each block adds up dweight and dbias over the rows that it walks, and writes one row of partial
// sums (param_sums.cuh). param_grad.cu adds up these rows in a fixed order. Operands that no wanted
// gradient needs are absent.
#include "math.cuh"
#include "param_sums.cuh"
#include "parameters.cuh"

#ifndef OWN_PARAMETERS
#define OWN_PARAMETERS false
#define OWN_DWEIGHT_T absent
#define OWN_DBIAS_T absent
#define ACCUMULATE false
#define BRANCH_T absent
#define DGATE_SUMS false
#endif

#ifndef FINDS_SUMS
#define FINDS_SUMS false
#define GIVEN_SUMS false
#endif

struct Build : RowBuild {
  using dy_t = DY_T;
  using dresidual_out_t = DRESIDUAL_OUT_T;
  using dx_t = DX_T;
  using dresidual_t = DRESIDUAL_T;
  using dgate_t = DGATE_T;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  // The gradients of parameters of which each row has its own.
  using own_dweight_t = OWN_DWEIGHT_T;
  using own_dbias_t = OWN_DBIAS_T;
  static constexpr bool own_parameters = OWN_PARAMETERS;  // rows of a segment differ in parameters
  static constexpr bool accumulate = ACCUMULATE;  // add to what own_dweight and own_dbias hold
  using branch_t = BRANCH_T;
  // Whether rows share a gate of the branch, or its row is one number: then dgate is a sum.
  static constexpr bool dgate_sums = DGATE_SUMS;
  static constexpr bool finds_sums = FINDS_SUMS;  // the results are sums over rows, not gradients
  static constexpr bool given_sums = GIVEN_SUMS;  // they are inputs
  static constexpr bool given_correction = finds_sums || given_sums;
  // Whether the gradient of p is needed.
  static constexpr bool dp = finds_sums || present<dx_t> || present<dresidual_t> || dgate_sums ||
                             (present<dgate_t> && (pre_gate || branch_gate));
  // Whether the kernel reduces over a row. If not, the first pass over the row computes nothing.
  static constexpr bool reduces = !given_sums && (center || dp);
  static constexpr int stages = STAGES;                   // rows copied ahead to shared memory
  static constexpr bool sums_in_shared = SUMS_IN_SHARED;  // whether shared memory holds sums
};

// The inputs that have an element for each row, and the numbers.
template <class B, bool = B::given_correction>
struct Scalars {
  const typename B::compute_t *mean, *rstd;
};
template <class B>
struct Scalars<B, true> : Scalars<B, false> {
  using C = typename B::compute_t;
  const C* correction;
  either<B::finds_sums, C, const C>*sum_dr, *sum_r_dr;
};
template <class B, bool = B::given_sums>
struct Numbers {
  Number<typename B::compute_t> k, weight_offset;
};
template <class B>
struct Numbers<B, true> : Numbers<B, false> {
  Number<typename B::compute_t> count;
};

template <class B>
struct SegmentArguments {
  Segments segments;
  Rows<typename B::own_dweight_t, 1> own_dweight;
  Rows<typename B::own_dbias_t, 1> own_dbias;
  RowsLikeX<const typename B::branch_t> branch;  // what the forward added to the stream, its x
  typename B::compute_t* dgate_sums;
};

template <class B>
struct Operands : either<(SEGMENT_AXES > 0), SegmentArguments<B>, absent> {
  using C = typename B::compute_t;
  RowsLikeX<const typename B::dy_t> dy;
  RowsLikeX<const typename B::dresidual_out_t> dresidual_out;
  RowsLikeX<const typename B::x_t> x;
  GateRows<const typename B::gate_t> gate;
  RowsLikeX<typename B::dx_t> dx;
  RowsLikeX<typename B::dgate_t> dgate;
  RowsLikeX<typename B::dresidual_t> dresidual;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  Scalars<B> scalars;
  C *dweight_sums, *dbias_sums;
  index_t rows, groups, width;  // rows of each group
};

template <class B>
struct Arguments : Operands<B>, Numbers<B> {};

#include "row_norm_backward_row.cuh"

// A row's own parameters, which are still to be loaded. If all rows of a segment share them, the
// shared ones take their place.
template <class B, bool own = B::own_parameters>
struct RowParameters {
  Parameters<B> of_row;

  __device__ RowParameters(const Arguments<B>& arguments, const Row<B>& row)
      : of_row(arguments, row.walk.share, row.index) {}
  __device__ Parameters<B>& parameters(Parameters<B>&) { return of_row; }
};
template <class B>
struct RowParameters<B, false> {
  __device__ RowParameters(const Arguments<B>&, const Row<B>&) {}
  __device__ Parameters<B>& parameters(Parameters<B>& shared) const { return shared; }
};

// Inputs of the next rows, which are being copied to shared memory, each row to a slot. A thread
// takes only the packs that it copied itself, so no barrier is needed. A result may share the
// memory of an input: a pack is overwritten only by the thread that has already taken it.
template <class B>
struct StagedRows {
  StagedPacks<B, typename B::dy_t> dy;
  StagedPacks<B, typename B::x_t> x;
  StagedPacks<B, either<B::scalar_gate, absent, typename B::gate_t>> gate;
  StagedPacks<B, typename B::dresidual_out_t> dresidual_out;
  StagedPacks<B, typename B::branch_t> branch;

  __device__ explicit StagedRows(SharedMemory& memory)
      : dy(memory), x(memory), gate(memory), dresidual_out(memory), branch(memory) {}

  __device__ void copy(const Arguments<B>& arguments, const Row<B>& row, int slot) const {
    const BackwardRow<B> inputs(arguments, row);  // only its addresses are used
    dy.copy(inputs.dy, row, slot);
    x.copy(inputs.x, row, slot);
    gate.copy(inputs.gate, row, slot);
    dresidual_out.copy(inputs.dresidual_out, row, slot);
    branch.copy(inputs.branch, row, slot);
    async_commit();
  }

  // Waits until the slot whose copies were started first is complete, and takes its row.
  __device__ void take(BackwardRow<B>& inputs, const Row<B>& row, int slot) const {
    async_wait<B::stages - 1>();
    dy.take(inputs.dy, row, slot);
    x.take(inputs.x, row, slot);
    gate.take(inputs.gate, row, slot);
    dresidual_out.take(inputs.dresidual_out, row, slot);
    branch.take(inputs.branch, row, slot);
    if constexpr (B::scalar_gate) inputs.gate.load(row.columns());
  }
};

// Processes held rows. `place` says where a row lies, and which columns are the thread's. A thread
// holds its packs of all operands in registers, and recent sums of their columns. It waits for the
// other threads of its team once per row, in `find_factors`.
template <class B>
__device__ inline void differentiate_held(const Arguments<B>& arguments, Team<B>& team,
                                          const Walk<B>& walk) {
  SharedMemory memory;
  const StagedRows<B> staged(memory);
  ParamSums<B> sums(arguments, walk, memory);
  Parameters<B> shared(arguments, walk.share, walk.share.row_index(0));
  RowScalars<B> next_scalars;
  int slot = 0;

  // Load the parameters once, and start to copy one row to each slot. Rows beyond the last row have
  // no columns.
  if constexpr (!B::own_parameters) shared.load(walk.whole_row().columns());
  if constexpr (B::stages > 0) {
    for (int i = 0; i < B::stages; ++i) staged.copy(arguments, walk.row(i), i);
    next_scalars = RowScalars<B>::load(arguments, walk.row(0));
  }

  walk.for_each_row([&](const auto& place) {
    // Load the row: from its slot, to which a later row is then copied, or from memory.
    const auto columns = place.columns();
    BackwardRow<B> row(arguments, place);
    RowParameters<B> own(arguments, place);
    auto& parameters = own.parameters(shared);
    if constexpr (B::own_parameters) parameters.load(columns);
    if constexpr (B::stages > 0) {
      staged.take(row, place, slot);
      staged.copy(arguments, place.after(B::stages), slot);
      slot = slot + 1 < B::stages ? slot + 1 : 0;
      row.scalars = next_scalars;
      next_scalars = RowScalars<B>::load(arguments, place.after(1));
    } else {
      row.scalars = RowScalars<B>::load(arguments, place);
      row.load(columns);
      row.load_rest(columns);
    }

    // Reduce.
    ItemSums<B> row_sums[3];
    if constexpr (B::reduces)
      columns.for_each_pack([&](auto at) { row.add_to(row_sums, at, parameters); });

    // Reduce over the team, and find the factors.
    row.find_factors(arguments, place, team, row_sums);

    // Store. Gates are recomputed: two numbers per item would take too many registers.
    if constexpr (!B::finds_sums)
      columns.for_each_pack([&](auto at) {
        sums.add(at,
                 [&](auto&... to_sums) { row.write(at, row.gates(at), parameters, to_sums...); });
      });
    sums.end_row(walk);
  });
  sums.finish(walk);  // the teams of a block wait for each other
}

#include "row_norm_backward_streamed.cuh"

template <class B>
__device__ inline void differentiate(const Arguments<B>& arguments, Team<B>& team) {
  const auto share = [&] {
    if constexpr (SEGMENT_AXES > 0)
      return BlockShare(row_groups(arguments), Team<B>::blocks, arguments.segments);
    else
      return BlockShare(row_groups(arguments), Team<B>::blocks);
  }();
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  if constexpr (streamed<B>)
    differentiate_streamed(arguments, team, walk);
  else
    differentiate_held(arguments, team, walk);
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_backward(const Arguments<Build> arguments) {
  if constexpr (Build::dweight || Build::dbias || Build::dgate_sums) launch_dependents();
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  differentiate(arguments, team);
}
