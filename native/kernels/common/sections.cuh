// sections.cuh: a tensor split along M into sections, and the strips of rows that blocks of threads work on.
#pragma once

#include "common/formats.cuh"

constexpr int STRIP = 64;  // rows; whole blocks of the columnwise half

struct Sections {
    const i64* sizes;  // rows of each; null: the whole tensor is one section
    int count;
    i64 rows;          // of the tensor
};

struct Section {
    i64 start, count;  // its rows
};

// Rows of section `number`, whose predecessor ends before row `start`. The host has not seen the sizes: what is wrong in
// them must not reach beyond the tensor.
__device__ __forceinline__ Section section_after(const Sections& sections, int number, i64 start) {
    const i64 left = sections.rows - start;
    const i64 wanted = sections.sizes[number];
    return {start, wanted < 0 ? 0 : wanted < left ? wanted : left};
}

__device__ __forceinline__ Section find_section(const Sections& sections, int number) {
    Section found = section_after(sections, 0, 0);
    for (int s = 1; s <= number; ++s) found = section_after(sections, s, found.start + found.count);
    return found;
}

// Up to STRIP rows of one section.
struct Strip {
    int section;
    i64 section_start;  // the section's first row in the tensor
    i64 section_rows;   // 0 where there is no such strip
    i64 start;          // the strip's first row in the section
    i64 codes_t, scales_t;  // where the section begins in flat columnwise codes and scales
};

// BLOCK elements of a column share a scale, PER_BYTE of them a byte.
template <int BLOCK, int PER_BYTE>
__device__ __forceinline__ Strip find_strip(const Sections& sections, i64 strip, i64 columns) {
    if (sections.sizes == nullptr) {
        const bool exists = strip * STRIP < sections.rows;
        return {0, 0, exists ? sections.rows : 0, strip * STRIP, 0, 0};
    }
    i64 start = 0, codes_t = 0, scales_t = 0;
    for (int s = 0; s < sections.count; ++s) {
        const Section section = section_after(sections, s, start);
        const i64 strips = (section.count + STRIP - 1) / STRIP;
        if (strip < strips) return {s, start, section.count, strip * STRIP, codes_t, scales_t};
        strip -= strips;
        start += section.count;
        codes_t += columns * ((section.count + PER_BYTE - 1) / PER_BYTE);
        scales_t += columns * ((section.count + BLOCK - 1) / BLOCK);
    }
    return {0, 0, 0, 0, 0, 0};
}
