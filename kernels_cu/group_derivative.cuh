// SPDX-License-Identifier: MIT
// The derivative of normalised groups along h, from which the backward finds dx and forward mode
// the tangent of y. With p = x - mean, whose mean over a group is the correction:
//
//   r = (p - correction) * rstd
//   rstd * (h - mean(h) - r * mean(r * h)) = rstd * h + factor_of_p * p + offset
#pragma once

#include "group_tile.cuh"

enum PartSums { SumH, SumHP, SumP };                  // sums of h, h * p and p in a part
enum GroupFactors { FactorOfP, Offset, Correction };  // of a group

// Finds a group's factors from the sums of its parts.
template <class T, class Group>
__device__ inline void combine_sums(const T* rstd_of_groups, const Group& group) {
  using C = typename Group::C;
  Pack<C, 3> sums = {};
  group.for_each_part([&](const auto& part) {
    for (int i = 0; i < 3; ++i) sums.item[i] += part.values.item[i];
  });
  sums = warp_all_reduce<32>(sums);
  if (!group.is_first_thread()) return;

  const C rstd = rstd_of_groups[group.index()], elements = group.elements();
  const C correction = sums.item[SumP] / elements, mean_h = sums.item[SumH] / elements;
  const C mean_rh = rstd * (sums.item[SumHP] - correction * sums.item[SumH]) / elements;
  const C factor_of_p = -rstd * rstd * mean_rh;
  group.put(FactorOfP, factor_of_p);
  group.put(Offset, -rstd * mean_h - correction * factor_of_p);
  group.put(Correction, correction);
}
