// From rows as a checkpoint stores them to panels of 16 rows (the layout is described in panels.h), and one row back.
#pragma once
#include <cstdint>

namespace slip {

struct StoredRows {
    const uint8_t* rows;
    int64_t row_bytes;
    int64_t n;
    int64_t k;
};

int64_t repacked_panel_bytes(int32_t format, int64_t k);
void repack_panels(int32_t format, const StoredRows& stored, int begin, int end, uint8_t* out);
void unpack_row(int32_t format, const uint8_t* panels, int64_t row, int64_t k, float* out);

}  // namespace slip
