// sections.cuh: a tensor split along M into sections, and strips of rows, the work of one or several thread blocks.
#pragma once

#include "common/formats.cuh"

namespace narrowgauge {

constexpr int STRIP = 64;  // rows of a strip: a multiple of every columnwise block

struct Sections {
    const i64* sizes;  // rows of each section, or null: the whole tensor is a section, or all have `rows` rows
    int count;
    i64 rows;          // rows of the tensor, or of each section
    const i64* starts = nullptr;  // first row of each section, or null: sections lie one behind another
};

struct Section {
    i64 start, count;  // first row, number of rows
};

// Section `number`, which begins at row `start` if the starts are not given. The host has not read sizes and starts, so wrong
// ones are clamped here: no section may reach beyond the tensor.
__device__ __forceinline__ Section section_after(const Sections& sections, int number, i64 start) {
    if (sections.starts != nullptr) {
        start = sections.starts[number];
        start = start < 0 ? 0 : start < sections.rows ? start : sections.rows;
    }
    const i64 left = sections.rows - start;
    const i64 size = sections.sizes[number];
    return {start, size < 0 ? 0 : size < left ? size : left};
}

__device__ __forceinline__ Section find_section(const Sections& sections, int number) {
    Section section = section_after(sections, 0, 0);
    for (int s = 1; s <= number; ++s) section = section_after(sections, s, section.start + section.count);
    return section;
}

// Up to STRIP rows of a section.
struct Strip {
    int section;
    i64 section_start;  // the section's first row in the tensor
    i64 section_rows;   // 0 if the tensor has no such strip
    i64 start;          // the strip's first row in the section
    i64 codes_t, scales_t;  // offsets of the section in the flat columnwise codes and scales
};

// BLOCK elements of a column share a scale; a byte holds PER_BYTE codes.
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

}  // namespace narrowgauge
