// unit.cuh: units of a quantize source: the kernels for a dtype, or the kernels for whole tiles. On a GPU a launch compiles the
// unit of its kernel alone, by the macro UNIT, and on a CPU all units. A source that is included for its functions, with
// AS_HEADER 1, has no kernels.
#pragma once

#define UNIT_ALL 0
#define UNIT_FP32 1
#define UNIT_BF16 2
#define UNIT_FP16 3
#define UNIT_TILES 4
#ifndef UNIT
#define UNIT UNIT_ALL
#endif
#ifndef AS_HEADER
#define AS_HEADER 0
#endif
#define IN_UNIT(NAME) (AS_HEADER == 0 && (UNIT == UNIT_ALL || UNIT == NAME))
