/* list_kernels FILE [ARCH...] - which kernels a module holds for which architecture: "sm_90: 84 kernels".
 * With architectures, such as 75 90: fails unless each is there, and all hold the same kernels.
 *
 * nvcc puts one ELF file per source and architecture into the module, uncompressed when it was told so.
 * Source: the ELF-64 format; machine 190 is CUDA; bits of e_flags as nvcc 12 and 13 write them, and checked
 * by the test. */
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA_MACHINE = 190, MOST = 64, ENTRY = 0x10 /* st_other of a __global__ function */ };

static struct arch {
    unsigned number;
    int n;
    uint64_t names; /* sum of the hashes of the kernels' names */
} archs[MOST];
static int n_archs;

static uint64_t hash(const char *s)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001b3u;
    return h;
}

static struct arch *find(unsigned number)
{
    for (int i = 0; i < n_archs; i++)
        if (archs[i].number == number) return &archs[i];
    if (n_archs == MOST) exit(1);
    archs[n_archs].number = number;
    return &archs[n_archs++];
}

/* Newer files (ABI version 8) have the architecture in the second byte of the flags. */
static unsigned architecture(const Elf64_Ehdr *e)
{
    return e->e_ident[EI_ABIVERSION] >= 8 ? e->e_flags >> 8 & 0xff : e->e_flags & 0xff;
}

/* Room for n bytes at `at` of size. */
static int holds(uint64_t at, uint64_t n, size_t size)
{
    return at <= size && n <= size - at;
}

static void read_symbols(const char *file, size_t size, const Elf64_Shdr *table, const Elf64_Shdr *names,
                         struct arch *arch)
{
    if (!holds(table->sh_offset, table->sh_size, size) || !holds(names->sh_offset, names->sh_size, size))
        return;
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table->sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym s;
        memcpy(&s, file + table->sh_offset + at, sizeof s);
        if (ELF64_ST_TYPE(s.st_info) != STT_FUNC || !(s.st_other & ENTRY) || s.st_name >= names->sh_size)
            continue;
        arch->n++;
        arch->names += hash(file + names->sh_offset + s.st_name);
    }
}

/* The ELF file that begins here. */
static void read_file(const char *file, size_t size)
{
    Elf64_Ehdr e;
    memcpy(&e, file, sizeof e);
    if (e.e_machine != CUDA_MACHINE || e.e_shentsize != sizeof(Elf64_Shdr) ||
        !holds(e.e_shoff, (uint64_t)e.e_shnum * sizeof(Elf64_Shdr), size))
        return;
    struct arch *arch = find(architecture(&e));
    for (int i = 0; i < e.e_shnum; i++) {
        Elf64_Shdr table, names;
        memcpy(&table, file + e.e_shoff + (size_t)i * sizeof table, sizeof table);
        if (table.sh_type != SHT_SYMTAB || table.sh_link >= e.e_shnum) continue;
        memcpy(&names, file + e.e_shoff + table.sh_link * sizeof names, sizeof names);
        read_symbols(file, size, &table, &names, arch);
    }
}

static char *load(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) return NULL;
    long n = ftell(f);
    char *all = n > 0 ? malloc((size_t)n) : NULL;
    rewind(f);
    if (all && fread(all, 1, (size_t)n, f) != (size_t)n) all = NULL;
    fclose(f);
    *size = (size_t)n;
    return all;
}

int main(int argc, char **argv)
{
    size_t size;
    char *all = argc > 1 ? load(argv[1], &size) : NULL;
    int wrong = 0;
    if (!all) {
        fprintf(stderr, "list_kernels: cannot read %s\n", argc > 1 ? argv[1] : "FILE");
        return 1;
    }
    for (size_t at = 0; at + sizeof(Elf64_Ehdr) <= size; at += 4)
        if (memcmp(all + at, ELFMAG, SELFMAG) == 0) read_file(all + at, size - at);
    for (int i = 0; i < n_archs; i++) printf("sm_%u: %d kernels\n", archs[i].number, archs[i].n);
    for (int i = 2; i < argc; i++) {
        const struct arch *a = find((unsigned)atoi(argv[i]));
        if (a->n && a->n == archs[0].n && a->names == archs[0].names) continue;
        printf("sm_%s: not the same kernels as sm_%u\n", argv[i], archs[0].number);
        wrong = 1;
    }
    free(all);
    return wrong || n_archs == 0;
}
