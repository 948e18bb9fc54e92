/* Offsets of the fields of Problem. The caller compares them with its own description of the struct, because fields in
   another order would silently access the wrong memory. */
#include <stddef.h>
#include <string.h>

#include "problem.h"

#define FIELD(name) {#name, offsetof(Problem, name)}

static const struct {
    const char *name;
    size_t offset;
} fields[] = {
    FIELD(batch), FIELD(heads), FIELD(rows), FIELD(columns), FIELD(dim), FIELD(width), FIELD(kernel_size), FIELD(offset),
    FIELD(window), FIELD(num_threads), FIELD(padded_dim), FIELD(padded_width), FIELD(block_rows), FIELD(margin),
    FIELD(next_block), FIELD(q), FIELD(k), FIELD(v), FIELD(kt), FIELD(vt), FIELD(bias_contributions), FIELD(edge),
    FIELD(bias), FIELD(w1), FIELD(w2), FIELD(w1t), FIELD(w2t), FIELD(document_starts), FIELD(out), FIELD(row_max),
    FIELD(row_sum),
    FIELD(splits), FIELD(dout), FIELD(delta), FIELD(dq), FIELD(dk), FIELD(dv), FIELD(dbias_contributions),
    FIELD(dedge), FIELD(dbias), FIELD(dw1), FIELD(dw2),
};

long cdape_problem_size(void) { return (long)sizeof(Problem); }

/* Return the offset of a field in bytes, or -1 if there is no field of this name. */
long cdape_field_offset(const char *name) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strcmp(fields[i].name, name) == 0) return (long)fields[i].offset;
    return -1;
}
