/* preflight: what a configuration becomes, what is refused and with which words, the identity of what makes the states,
 * the memory and disk plan; the checks of the machine; run folder and sockets.
 *   test_preflight GOLDEN/llama */
#include "daemon/preflight.h"
#include "ipc/log.h"
#include <grp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char model[1024], dir[64];
static sl_err e;

typedef struct plan {
    sl_config c;
    sl_topo t;
    sl_preflight p;
} plan;

static char *at(const char *name) { /* of the last four calls */
    static char path[4][256];
    static int i;
    i = (i + 1) % 4;
    snprintf(path[i], sizeof path[i], "%s/%s", dir, name);
    return path[i];
}
static void put(const char *name, const char *text) {
    FILE *f = fopen(at(name), "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}
static void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *fmt, ...) {
    char cmd[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(cmd, sizeof cmd, fmt, ap);
    va_end(ap);
    if (system(cmd)) fail_msg("%s", cmd);
}
static void fresh_dir(void) {
    shell("rm -rf %s && mkdir %s", dir, dir);
}

/* Settings: "section.key=value", ended by NULL, on top of a model and a store. */
static plan *configure(const char *const *set) {
    plan *x = calloc(1, sizeof *x);
    assert_non_null(x);
    sl_config_default(&x->c);
    snprintf(x->c.boot.model, sizeof x->c.boot.model, "%s", model);
    snprintf(x->c.boot.store, sizeof x->c.boot.store, "%s", at("store"));
    for (const char *const *s = set; *s; s++)
        if (sl_config_set(&x->c, *s, &e)) fail_msg("%s", e.msg);
    memset(&e, 0, sizeof e);
    return x;
}
static plan *resolve(const char *const *set) {
    plan *x = configure(set);
    if (sl_preflight_resolve(&x->p, &x->c, &x->t, &e)) fail_msg("%s: %s", set[0] ? set[0] : "", e.msg);
    return x;
}
static void drop(plan *x) {
    sl_preflight_free(&x->p);
    free(x);
}
#define SET(...) ((const char *const[]){"model.backend=cpu", __VA_ARGS__, NULL})
static void refused(const char *const *set, const char *says) {
    plan *x = configure(set);
    int rc = sl_preflight_resolve(&x->p, &x->c, &x->t, &e);
    if (rc != SL_ECONFIG || e.code != SL_ECONFIG || !strstr(e.msg, says))
        fail_msg("%s: got %d '%s', expected '%s'", set[1], rc, e.msg, says);
    drop(x);
}

/* ---- resolve ---- */

static void captures(void **s) {
    (void)s;
    fresh_dir();
    plan *x = resolve(SET("capture.layers=1,n", "capture.final=pre"));
    const sl_boot *b = &x->c.boot;
    uint32_t n = b->n_layers;
    assert_int_equal(b->n_captures, 2);
    assert_true(b->captures[0].hidx == 1 && b->captures[1].hidx == n && !b->captures[1].final_norm);
    drop(x);
    x = resolve(SET("capture.layers=1,n", "capture.final=post"));
    b = &x->c.boot;
    assert_int_equal(b->n_captures, 2);
    assert_true(!b->captures[0].final_norm && b->captures[1].hidx == n && b->captures[1].final_norm);
    drop(x);
    x = resolve(SET("capture.layers=1,n", "capture.final=both"));
    b = &x->c.boot;
    assert_int_equal(b->n_captures, 3);
    assert_true(b->captures[1].hidx == n && !b->captures[1].final_norm);
    assert_true(b->captures[2].hidx == n && b->captures[2].final_norm);
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    sl_preflight_print(&x->p, &x->c, f);
    fclose(f);
    char want[64];
    snprintf(want, sizeof want, "states    H[1] H[%u] norm(H[%u]) of 0..%u, bf16:", n, n, n);
    if (!strstr(text, want)) fail_msg("no '%s' in\n%s", want, text);
    free(text);
    drop(x);
    refused(SET("capture.layers=1", "capture.final=post"), "[capture] final = post needs the last state");
    refused(SET("capture.layers=1", "capture.final=both"), "[capture] final = both needs the last state");
    refused(SET("capture.layers=99"), "[capture] layers = 99");
}

static void codecs(void **s) {
    (void)s;
    static const struct {
        const char *set[4];
        uint32_t codec, elem_size;
        const char *note;
    } c[] = {
        {{"model.precision=bf16"}, SL_CODEC_BF16, 2, ""},
        {{"model.precision=f32"}, SL_CODEC_ZSTD, 4, "codec zstd: the states are f32"},
        {{"model.precision=f32", "store.codec=none"}, SL_CODEC_NONE, 4, ""},
        {{"store.layout=files"}, SL_CODEC_NONE, 2, ""},
        {{"store.layout=files", "store.codec=none"}, SL_CODEC_NONE, 2, ""},
    };
    fresh_dir();
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        plan *x = resolve(c[i].set);
        if (x->c.boot.codec != c[i].codec || x->c.boot.elem_size != c[i].elem_size || !strstr(x->p.notes, c[i].note))
            fail_msg("%s: codec %u, %u bytes an element, '%s'", c[i].set[0], x->c.boot.codec, x->c.boot.elem_size,
                     x->p.notes);
        assert_int_equal(x->p.token_bytes, (uint64_t)x->c.boot.n_captures * x->c.boot.width * c[i].elem_size);
        drop(x);
    }
#ifndef SL_HAVE_CUDA
    plan *x = resolve((const char *const[]){"model.backend=auto", "model.precision=f32", NULL});
    assert_string_equal(x->p.notes, "backend auto: cpu (built without CUDA)\ncodec zstd: the states are f32\n");
    drop(x);
    refused((const char *const[]){"model.backend=cuda", "model.precision=f32", NULL}, "this build has no CUDA backend");
#endif
    refused(SET("model.precision=f32", "store.codec=bf16"), "codec = bf16 cannot hold f32 states");
    refused(SET("store.layout=files", "store.codec=zstd"), "codec must be none");
}

static void widths_and_chunks(void **s) {
    (void)s;
    fresh_dir();
    refused(SET("parallel.ranks=63"), "[parallel] ranks = 63");
    char groups[48], says[96];
    snprintf(groups, sizeof groups, "parallel.groups=%d", SL_MAX_GROUPS);
    snprintf(says, sizeof says, "%d groups of 2 ranks are more than %d ranks", SL_MAX_GROUPS, SL_MAX_RANKS);
    if (SL_MAX_GROUPS * 2 > SL_MAX_RANKS) refused(SET("parallel.ranks=2", groups), says);
    plan *x = resolve(SET("batch.tokens=100", "batch.max_length=300"));
    assert_int_equal(x->p.need.batch_tokens, 300); /* a row may be longer than a batch */
    assert_int_equal(x->c.boot.chunk_rows, 300);
    assert_true(x->c.boot.tp == 1 && x->c.boot.dp == 1);
    drop(x);
    x = resolve(SET("batch.tokens=100000"));
    assert_int_equal(x->c.boot.chunk_rows, (1 << 20) / (x->c.boot.width * x->c.boot.elem_size)); /* a MiB */
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    assert_int_equal(x->c.boot.threads, cpus);
    drop(x);
    x = resolve(SET("parallel.groups=2", "parallel.ranks=2"));
    assert_int_equal(x->c.boot.threads, cpus > 4 ? cpus / 4 : 1); /* of all ranks together no more than there are */
    drop(x);
}

/* The plan adds up: every rank of every group counts, f32 costs more, the head is loaded where the NLL needs it. */
static void memory(void **s) {
    (void)s;
    fresh_dir();
    plan *one = resolve(SET("parallel.groups=1", "capture.nll_every=0")),
         *two = resolve(SET("parallel.groups=2", "capture.nll_every=0")),
         *f32 = resolve(SET("model.precision=f32", "capture.nll_every=0")),
         *low = resolve(SET("capture.layers=1", "capture.nll_every=0")), *nll = resolve(SET("capture.layers=1")),
         *all = resolve(SET("capture.layers=n"));
    uint64_t rank = one->p.rank_weights + one->p.rank_workspace;
    assert_int_equal(two->p.total - two->p.rings, one->p.total - one->p.rings + rank);
    assert_true(two->p.rings > one->p.rings);
    assert_true(f32->p.rank_workspace > one->p.rank_workspace);
    assert_true(low->p.rank_weights < one->p.rank_weights);
    assert_true(nll->p.rank_weights > low->p.rank_weights);
    assert_int_equal(nll->p.rank_weights, all->p.rank_weights); /* the head reads the last state, captured or not */
    plan *p = one;
    p->p.available = 0; /* unknown */
    assert_int_equal(sl_preflight_memory(&p->p, &p->c, &e), 0);
    p->p.available = p->p.total;
    assert_int_equal(sl_preflight_memory(&p->p, &p->c, &e), 0);
    p->p.available = p->p.total - 1; /* of a machine that has more: others use it */
    assert_int_equal(sl_preflight_memory(&p->p, &p->c, &e), SL_ETEMP);
    if (!strstr(e.msg, "MiB are available")) fail_msg("%s", e.msg);
    p->p.total = 1ull << 60; /* more than any machine has */
    assert_int_equal(sl_preflight_memory(&p->p, &p->c, &e), SL_ECONFIG);
    assert_true(sl_memory_available() > 0);
    plan *x = resolve(SET("memory.limit=1MiB"));
    assert_int_equal(x->p.available, 1 << 20);
    assert_int_equal(sl_preflight_memory(&x->p, &x->c, &e), SL_ECONFIG);
    if (!strstr(e.msg, "but 1 MiB are allowed by [memory] limit")) fail_msg("%s", e.msg);
    drop(x), drop(one), drop(two), drop(f32), drop(low), drop(nll), drop(all);
}

static void disk(void **s) {
    (void)s;
    fresh_dir();
    plan *x = resolve(SET("store.codec=none"));
    uint64_t none = sl_preflight_disk(&x->p, &x->c, 1000);
    assert_int_equal(none, 1000 * x->p.token_bytes + 5000);
    x->c.boot.codec = SL_CODEC_ZSTD;
    uint64_t zstd = sl_preflight_disk(&x->p, &x->c, 1000);
    x->c.boot.codec = SL_CODEC_BF16;
    uint64_t bf16 = sl_preflight_disk(&x->p, &x->c, 1000);
    assert_true(bf16 < zstd && zstd < none && 2 * bf16 > none);
    drop(x);
}

/* Stages run elsewhere: every path is absolute. */
static void paths(void **s) {
    (void)s;
    char here[1024], want[1400];
    fresh_dir();
    assert_non_null(getcwd(here, sizeof here));
    shell("ln -s %s %s", model, at("m"));
    put("t.jinja", "x");
    put("tokenizer.json", "{}");
    assert_int_equal(chdir(dir), 0);
    plan *x =
        configure(SET("store.path=s", "model.path=m", "model.chat_template=t.jinja", "model.tokenizer=tokenizer.json"));
    int rc = sl_preflight_resolve(&x->p, &x->c, &x->t, &e);
    assert_int_equal(chdir(here), 0);
    if (rc) fail_msg("%s", e.msg);
    const sl_boot *b = &x->c.boot;
    char *real = realpath(at("s"), NULL);
    assert_string_equal(b->store, real);
    free(real);
    real = realpath(model, NULL);
    assert_string_equal(b->model, real);
    free(real);
    real = realpath(at("t.jinja"), NULL);
    assert_string_equal(b->chat_template, real);
    free(real);
    assert_true(b->tokenizer[0] == '/');
    drop(x);
    snprintf(want, sizeof want, "store.path=%s", at("no/such/folder"));
    refused(SET(want), "[store] path = ");
    snprintf(want, sizeof want, "model.path=%s", at("nothing"));
    refused(SET(want), "[model] path = ");
    snprintf(want, sizeof want, "model.chat_template=%s", at("nothing"));
    refused(SET(want), "[model] chat_template = ");
}

/* The manifest tells states of other weights, another tokenizer or another template apart. */
static void identity(void **s) {
    (void)s;
    char set[4][600];
    fresh_dir();
    shell("mkdir %s && ln -s %s/model.safetensors %s/config.json %s", at("m"), model, model, at("m"));
    snprintf(set[0], sizeof set[0], "model.path=%s", at("m"));
    plan *x = resolve(SET(set[0]));
    assert_string_equal(x->c.boot.tokenizer_hash, "none");
    assert_string_equal(x->c.boot.template_hash, "none");
    char fingerprint[sizeof x->c.boot.model_fingerprint];
    strcpy(fingerprint, x->c.boot.model_fingerprint);
    drop(x);
    char tok[2][80], tmpl[4][80];
    for (int i = 0; i < 2; i++) {
        put("m/tokenizer.json", i ? "{\"a\": 1}" : "{}");
        put("m/tokenizer_config.json", i ? "{\"chat_template\": \"b\"}" : "{\"chat_template\": \"a\"}");
        x = resolve(SET(set[0]));
        snprintf(tok[i], 80, "%s", x->c.boot.tokenizer_hash);
        snprintf(tmpl[i], 80, "%s", x->c.boot.template_hash);
        assert_int_equal(strncmp(tok[i], "xxh128:", 7), 0);
        assert_int_equal(strncmp(tmpl[i], "xxh128:", 7), 0);
        assert_string_equal(x->c.boot.model_fingerprint, fingerprint);
        drop(x);
    }
    assert_string_not_equal(tok[0], tok[1]);
    assert_string_not_equal(tmpl[0], tmpl[1]);
    put("m/chat_template.jinja", "c"); /* a file of its own comes before the configuration */
    x = resolve(SET(set[0]));
    snprintf(tmpl[2], 80, "%s", x->c.boot.template_hash);
    assert_string_not_equal(tmpl[1], tmpl[2]);
    drop(x);
    put("mine.jinja", "a"); /* and one that is named before both; the same text has the same hash wherever it stands */
    put("mine.json", "{}");
    snprintf(set[1], sizeof set[1], "model.chat_template=%s", at("mine.jinja"));
    snprintf(set[2], sizeof set[2], "model.tokenizer=%s", at("mine.json"));
    x = resolve(SET(set[0], set[1], set[2]));
    assert_string_equal(x->c.boot.template_hash, tmpl[0]);
    assert_string_equal(x->c.boot.tokenizer_hash, tok[0]);
    drop(x);
    x = resolve(SET(set[0], "model.weights=random", "model.random_seed=5"));
    assert_string_equal(x->c.boot.model_fingerprint, "random:5");
    drop(x);
}

/* ---- checks ---- */

static const sl_check *check(const plan *x, const char *name) {
    static sl_check k[16];
    int n = sl_preflight_checks(&x->c, k, 16);
    for (int i = 0; i < n; i++)
        if (!strcmp(k[i].name, name)) return &k[i];
    fail_msg("no check %s", name);
    return NULL;
}
static void found(const char *const *set, const char *name, sl_check_state state, const char *says) {
    plan *x = configure(set);
    const sl_check *k = check(x, name);
    if (k->state != state || !strstr(k->found, says))
        fail_msg("%s with %s: %s '%s', expected %s '%s'", name, set[1], sl_check_state_name(k->state), k->found,
                 sl_check_state_name(state), says);
    if ((k->remedy[0] != 0) != (state == SL_CHECK_WARN || state == SL_CHECK_FAIL))
        fail_msg("%s: the remedy is '%s'", name, k->remedy);
    free(x);
}

static void checks(void **s) {
    (void)s;
    char set[700], run[700], want[700];
    fresh_dir();
    snprintf(run, sizeof run, "daemon.run_dir=%s", at("run"));
    found(SET(run), "sockets", SL_CHECK_OK, at("run"));
    assert_int_equal(access(at("run"), F_OK), -1); /* a check leaves nothing behind ... */
    assert_int_equal(mkdir(at("run"), 0700), 0);
    found(SET(run), "sockets", SL_CHECK_OK, at("run"));
    assert_int_equal(access(at("run"), F_OK), 0); /* ... and takes nothing away */
    found(SET(run, "daemon.socket_group=no_such_group_here"), "sockets", SL_CHECK_FAIL,
          "there is no group 'no_such_group_here'");
    put("file", "");
    snprintf(set, sizeof set, "daemon.run_dir=%s", at("file"));
    found(SET(set), "sockets", SL_CHECK_FAIL, "no folder");
    /* a store that is still to be made is judged by the folder that it will be in */
    snprintf(set, sizeof set, "store.path=%s", at("a/b/c"));
    snprintf(want, sizeof want, "files can be made in %s", dir);
    found(SET(run, set), "store", SL_CHECK_OK, want);
    found(SET(run, "store.path=/nonexistent/deeper"), "space", SL_CHECK_OK, "GB are free in /");
    found(SET(run, "store.path=nonexistent/deeper"), "store", SL_CHECK_OK, "files can be made in .");
    found(SET(run, "store.path=/proc/self"), "store", SL_CHECK_FAIL, "cannot write in /proc/self");
    snprintf(set, sizeof set, "store.path=%s", dir);
    found(SET(run, set, "store.reserve=1000000GiB"), "space", SL_CHECK_WARN, "not more than the reserve");
    found(SET(run, set, "store.direct_io=no"), "o_direct", SL_CHECK_OK, "switched off");
    found(SET(run, "store.path=/proc/self"), "o_direct", SL_CHECK_WARN, "refuses O_DIRECT");
    found(SET(run, "memory.hugepages=no"), "hugepages", SL_CHECK_OK, "switched off");
    struct rlimit old, r;
    getrlimit(RLIMIT_MEMLOCK, &old);
    r = old;
    r.rlim_cur = 1 << 20;
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &r), 0);
    found(SET(run), "memlock", SL_CHECK_WARN, "only 1024 KiB");
    if (old.rlim_max >= 64 << 20) {
        r.rlim_cur = 64 << 20;
        assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &r), 0);
        found(SET(run), "memlock", SL_CHECK_OK, "64 MiB may be locked");
    }
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &old), 0);
    /* every program is looked for, the last one too */
    static const char *const programs[] = {"sluice-feeder", "sluice-compute", "sluice-gather", "sluice-writer"};
    snprintf(set, sizeof set, "daemon.stage_dir=%s", dir);
    for (int missing = 0; missing < 4; missing++) {
        for (int i = 0; i < 4; i++) {
            unlink(at(programs[i]));
            if (i != missing) assert_int_equal(symlink("/bin/true", at(programs[i])), 0);
        }
        found(SET(run, set), "stages", SL_CHECK_FAIL, programs[missing]);
    }
    assert_int_equal(symlink("/bin/true", at(programs[3])), 0);
    found(SET(run, set), "stages", SL_CHECK_OK, "all stage programs are there");
}

static void checks_of_the_model(void **s) {
    (void)s;
    char run[300], set[300];
    fresh_dir();
    snprintf(run, sizeof run, "daemon.run_dir=%s", at("run"));
    found(SET(run), "model", SL_CHECK_OK, "the plan needs");
    assert_int_equal(access(at("store"), F_OK), -1); /* a check leaves nothing behind */
    assert_int_equal(mkdir(at("store"), 0700), 0);
    found(SET(run), "model", SL_CHECK_OK, "the plan needs");
    assert_int_equal(access(at("store"), F_OK), 0);
    found(SET(run, "memory.limit=1MiB"), "model", SL_CHECK_FAIL, "the memory plan needs");
    found(SET(run, "parallel.ranks=63"), "model", SL_CHECK_FAIL, "[parallel] ranks = 63");
    found(SET(run, "model.path="), "model", SL_CHECK_SKIP, "not configured");
    shell("mkdir %s && ln -s %s/model.safetensors %s && sed '0,/{/s//{\"never_heard_of\": 3,/' %s/config.json > %s",
          at("m"), model, at("m"), model, at("m/config.json"));
    snprintf(set, sizeof set, "model.path=%s", at("m"));
    found(SET(run, set), "model", SL_CHECK_WARN, "never_heard_of");
}

/* ---- run folder and sockets ---- */

static void expect_sockets(const char *const *set, int rc, const char *says) {
    plan *x = configure(set);
    int got = sl_preflight_sockets(&x->c, &e);
    if (got != rc || (rc && !strstr(e.msg, says))) fail_msg("%s: %d '%s', expected '%s'", set[1], got, e.msg, says);
    if (!rc && says && strcmp(x->c.boot.sock_control, says) != 0)
        fail_msg("%s: the socket is %s, expected %s", set[1], x->c.boot.sock_control, says);
    free(x);
}

static void run_folders(void **s) {
    (void)s;
    char set[300], want[300], other[300];
    fresh_dir();
    /* where a service manager, then a session, says; the first one where there are several */
    snprintf(other, sizeof other, "%s:/nowhere", at("r"));
    setenv("RUNTIME_DIRECTORY", other, 1), setenv("XDG_RUNTIME_DIR", dir, 1);
    snprintf(want, sizeof want, "ipc://%s/control.sock", at("r"));
    expect_sockets(SET("daemon.run_dir="), 0, want);
    setenv("RUNTIME_DIRECTORY", "", 1);
    snprintf(want, sizeof want, "ipc://%s/control.sock", at("sluice"));
    expect_sockets(SET("daemon.run_dir="), 0, want);
    unsetenv("RUNTIME_DIRECTORY"), unsetenv("XDG_RUNTIME_DIR");
    struct stat st;
    assert_true(!stat(at("sluice"), &st) && (st.st_mode & 07777) == 0700);
    /* with a group: its members may enter, and the sockets' mode will follow */
    struct group *g = getgrgid(getegid());
    if (g) {
        char group[96];
        snprintf(group, sizeof group, "daemon.socket_group=%s", g->gr_name);
        snprintf(set, sizeof set, "daemon.run_dir=%s", at("for_a_group"));
        plan *x = configure(SET(set, group));
        if (sl_preflight_sockets(&x->c, &e)) fail_msg("%s", e.msg);
        assert_int_equal(x->c.boot.socket_gid1, getegid() + 1);
        assert_true(x->c.run_dir_made && !stat(at("for_a_group"), &st));
        assert_true((st.st_mode & 07777) == 0750 && st.st_gid == getegid());
        free(x);
    }
    expect_sockets(SET(set, "daemon.socket_group=no_such_group_here"), SL_ECONFIG, "socket_group = no_such_group_here");
    /* what somebody else could have put there */
    assert_int_equal(symlink("r", at("link")), 0);
    snprintf(set, sizeof set, "daemon.run_dir=%s", at("link"));
    expect_sockets(SET(set), SL_ECONFIG, "is no folder");
    assert_int_equal(mkdir(at("open"), 0700) || chmod(at("open"), 0777), 0);
    snprintf(set, sizeof set, "daemon.run_dir=%s", at("open"));
    expect_sockets(SET(set), SL_ECONFIG, "mode 777; it must be this user's");
    if (!geteuid()) {
        assert_int_equal(chmod(at("open"), 0700) || chown(at("open"), 1, 1), 0);
        expect_sockets(SET(set), SL_ECONFIG, "belongs to uid 1");
    }
    snprintf(set, sizeof set, "daemon.run_dir=%s", at("no/such/folder"));
    expect_sockets(SET(set), SL_ECONFIG, "cannot be made");
}

/* The kernel allows 107 bytes; "progress.sock" is the longest name. */
static void long_paths(void **s) {
    (void)s;
    char set[400], name[200];
    fresh_dir();
    size_t fits = 107 - strlen("/progress.sock") - strlen(dir) - 1;
    for (size_t more = 0; more < 2; more++) {
        memset(name, 'x', sizeof name);
        name[fits + more] = 0;
        snprintf(set, sizeof set, "daemon.run_dir=%s", at(name));
        expect_sockets(SET(set), more ? SL_ECONFIG : 0, more ? "has 108 bytes, the kernel allows 107" : NULL);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    char *real = realpath(argv[1], NULL);
    if (!real || strlen(real) >= sizeof model) return 2;
    strcpy(model, real);
    free(real);
    strcpy(dir, "/tmp/sl-preflight-XXXXXX");
    if (!mkdtemp(dir)) return 1;
    sl_log_init("test", SL_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(captures),    cmocka_unit_test(codecs),     cmocka_unit_test(widths_and_chunks),
        cmocka_unit_test(memory),      cmocka_unit_test(disk),       cmocka_unit_test(paths),
        cmocka_unit_test(identity),    cmocka_unit_test(checks),     cmocka_unit_test(checks_of_the_model),
        cmocka_unit_test(run_folders), cmocka_unit_test(long_paths),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    char cmd[96];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    return system(cmd) || rc;
}
