#include "stages/feeder/template.h"
#include "ipc/file.h"
#include "ipc/metrics.h"
#include "stages/compute/gguf.h"
#include "stages/feeder/rows.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define MAX_SOURCE (4u << 20)

/* ---- finding the template ---- */

/* A whole small file, NUL-terminated; NULL and errno otherwise. */
static char *read_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "re");
    if (!f) return NULL;
    char *buf = malloc(MAX_SOURCE * 4 + 1);
    errno = 0;
    *n = buf ? fread(buf, 1, MAX_SOURCE * 4, f) : 0;
    int bad = ferror(f) ? errno ? errno : EIO : 0;
    fclose(f);
    if (!buf || bad) {
        free(buf);
        errno = bad ? bad : ENOMEM;
        return NULL;
    }
    buf[*n] = 0;
    char *fit = realloc(buf, *n + 1);
    return fit ? fit : buf;
}

static int set_source(sl_template *t, const char *s, size_t n, const char *from, sl_err *err) {
    if (n > MAX_SOURCE || memchr(s, 0, n) || sl_utf8_check(s, n) < n)
        return sl_err_set(err, SL_ECONFIG, "%s: the chat template is not text of at most %u bytes", from, MAX_SOURCE);
    free(t->source);
    if (!(t->source = strndup(s, n))) return sl_err_set(err, SL_ETEMP, "no memory for the chat template");
    snprintf(t->from, sizeof t->from, "%s", from);
    return SL_OK;
}

/* "chat_template" of a JSON file: a string, or a list of {name, template}. */
static int take_named(sl_template *t, json_t *ct, const char *from, sl_err *err) {
    if (json_is_string(ct)) return set_source(t, json_string_value(ct), json_string_length(ct), from, err);
    if (!json_is_array(ct)) return SL_OK;
    size_t i;
    json_t *e, *first = NULL;
    int rc = SL_OK;
    json_array_foreach(ct, i, e) {
        const char *name = json_string_value(json_object_get(e, "name"));
        json_t *src = json_object_get(e, "template");
        if (!name || !json_is_string(src)) continue;
        if (!first) first = src;
        if (!strcmp(name, "default")) first = src;
        if (!strcmp(name, "tool_use")) {
            free(t->source_tools);
            t->source_tools = strdup(json_string_value(src));
        }
    }
    if (first) rc = set_source(t, json_string_value(first), json_string_length(first), from, err);
    return rc;
}

static void take_special(sl_template *t, const json_t *conf) {
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                        "sep_token", "cls_token", "mask_token"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        json_t *v = json_object_get(conf, names[i]);
        if (json_is_object(v)) v = json_object_get(v, "content");
        if (json_is_string(v)) json_object_set(t->vars, names[i], v);
    }
}

/* A file that may be missing, as JSON: *out = NULL when there is none. A file that is there and cannot be opened just
 * now is not one that is missing: rows would go through another template, or be turned away for want of one. */
static int load_json(json_t **out, const char *path, json_error_t *e, sl_err *err) {
    *out = NULL;
    FILE *f = fopen(path, "re");
    if (!f && (errno == ENOENT || errno == ENOTDIR)) return SL_OK;
    if (!f) return sl_err_sys(err, sl_file_read_code(errno), errno, "reading %s", path);
    *out = json_loadf(f, JSON_DECODE_INT_AS_REAL, e);
    fclose(f);
    if (*out) return SL_OK;
    return sl_err_set(err, json_error_code(e) == json_error_out_of_memory ? SL_ETEMP : SL_ECONFIG, "%s line %d: %s",
                      path, e->line, e->text);
}

static int from_folder(sl_template *t, const char *dir, sl_err *err) {
    char path[PATH_MAX];
    size_t n;
    json_error_t e;
    json_t *j;
    snprintf(path, sizeof path, "%.4000s/special_tokens_map.json", dir);
    int rc = load_json(&j, path, &e, err);
    if (rc == SL_ETEMP) return rc; /* (one that is no JSON is passed over) */
    take_special(t, j);
    json_decref(j);
    snprintf(path, sizeof path, "%.4000s/tokenizer_config.json", dir);
    if ((rc = load_json(&j, path, &e, err))) return rc;
    take_special(t, j);
    rc = take_named(t, json_object_get(j, "chat_template"), path, err);
    json_decref(j);
    if (rc) return rc;
    snprintf(path, sizeof path, "%.4000s/chat_template.json", dir);
    if ((rc = load_json(&j, path, &e, err)) == SL_ETEMP) return rc;
    rc = take_named(t, json_object_get(j, "chat_template"), path, err);
    json_decref(j);
    if (rc) return rc;
    snprintf(path, sizeof path, "%.4000s/chat_template.jinja", dir);
    char *s = read_file(path, &n);
    if (!s && sl_file_read_code(errno) == SL_ETEMP) return sl_err_sys(err, SL_ETEMP, errno, "reading %s", path);
    if (!s) return SL_OK;
    rc = set_source(t, s, n, path, err); /* the newest place wins */
    free(s);
    return rc;
}

static void gguf_token(sl_template *t, const sl_gguf *g, const char *key, const char *name) {
    uint64_t id;
    sl_gguf_str s;
    if (sl_gguf_u64(g, key, &id) || sl_gguf_arr_str(g, "tokenizer.ggml.tokens", id, &s)) return;
    json_t *v = json_stringn(s.s, s.n);
    if (v) json_object_set_new(t->vars, name, v);
}

static int from_gguf(sl_template *t, const char *path, sl_err *err) {
    sl_gguf *g;
    sl_gguf_str s;
    int rc = sl_gguf_open(&g, path, err);
    if (rc) return rc;
    gguf_token(t, g, "tokenizer.ggml.bos_token_id", "bos_token");
    gguf_token(t, g, "tokenizer.ggml.eos_token_id", "eos_token");
    gguf_token(t, g, "tokenizer.ggml.unknown_token_id", "unk_token");
    gguf_token(t, g, "tokenizer.ggml.padding_token_id", "pad_token");
    if (!sl_gguf_string(g, "tokenizer.chat_template", &s)) rc = set_source(t, s.s, s.n, path, err);
    sl_gguf_close(g);
    return rc;
}

static int load(sl_template *t, const char *model, const char *file, const char *args, sl_err *err) {
    struct stat st;
    int rc = SL_OK;
    if (model && *model && !stat(model, &st)) {
        if (S_ISDIR(st.st_mode))
            rc = from_folder(t, model, err);
        else if (strlen(model) > 5 && !strcmp(model + strlen(model) - 5, ".gguf"))
            rc = from_gguf(t, model, err);
        else { /* a tokenizer file: its folder */
            char dir[PATH_MAX];
            snprintf(dir, sizeof dir, "%s", model);
            char *slash = strrchr(dir, '/');
            if (slash) *slash = 0;
            rc = from_folder(t, slash ? dir : ".", err);
        }
    }
    if (!rc && file && *file) {
        size_t n;
        char *s = read_file(file, &n);
        if (!s) return sl_err_sys(err, sl_file_read_code(errno), errno, "reading the chat template %s", file);
        free(t->source_tools);
        t->source_tools = NULL;
        rc = set_source(t, s, n, file, err);
        free(s);
    }
    if (!rc && args && *args) {
        json_error_t e;
        json_t *a = json_loads(args, JSON_REJECT_DUPLICATES, &e);
        if (!json_is_object(a))
            rc = sl_err_set(err, SL_ECONFIG, "template_args: expected a JSON object: %s",
                            a ? "found another type" : e.text);
        else
            json_object_update(t->vars, a);
        json_decref(a);
    }
    return rc;
}

int sl_template_load(sl_template **out, const char *model, const char *file, const char *args, sl_err *err) {
    *out = NULL;
    sl_template *t = calloc(1, sizeof *t);
    if (!t || !(t->vars = json_object())) {
        free(t);
        return sl_err_set(err, SL_ETEMP, "no memory for the chat template");
    }
    int rc = load(t, model, file, args, err);
    if (rc || !t->source) {
        if (!rc)
            sl_err_set(
                err, SL_ECONFIG,
                "%s has no chat template (looked for chat_template.jinja, chat_template.json, tokenizer_config.json, "
                "tokenizer.chat_template); name one with chat_template",
                model && *model ? model : "the model");
        sl_template_free(t);
        return rc;
    }
    XXH128_hash_t h = XXH3_128bits(t->source, strlen(t->source));
    snprintf(t->hash, sizeof t->hash, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
    *out = t;
    return SL_OK;
}

void sl_template_free(sl_template *t) {
    if (!t) return;
    free(t->source);
    free(t->source_tools);
    json_decref(t->vars);
    free(t);
}

void sl_rendered_free(sl_rendered *r) {
    free(r->text);
    free(r->spans);
    memset(r, 0, sizeof *r);
}

/* ---- the helper process ----
 *
 * How asking it ends, besides SL_OK:
 *   SL_EDATA      it says that the template failed on this row; it stays usable
 *   GONE          it has ended; `ended` finds out what that means
 *   SL_EINTERNAL  it hangs, is out of step, or died on this row: it is stopped, and the row is to blame
 *   SL_ETEMP      memory, descriptors or processes are short: it is stopped, nobody is to blame, and the row is tried
 *                 again later */
enum { GONE = 1 };
/* What became of a child that could not become the helper. */
enum { CHILD_LATER = 75, CHILD_NEVER = 78 };
enum { MAX_KILLED = 3 }; /* helpers that somebody (the kernel, for want of memory) may kill before the row is blamed */

struct sl_renderer {
    const sl_template *t;
    char helper[PATH_MAX];
    pid_t pid;
    int fd;
    bool tags;
    uint64_t starts;
    unsigned killed; /* helpers killed from outside, one after the other, on the same row */
    sl_err broken; /* the template cannot be compiled: every row fails with this, without starting a helper each time */
};

#ifndef SL_HELPER_SOURCE
#define SL_HELPER_SOURCE ""
#endif
#ifndef SL_HELPER_INSTALLED
#define SL_HELPER_INSTALLED ""
#endif

static int find_helper(char out[PATH_MAX], const char *named, sl_err *err) {
    char exe[PATH_MAX] = "", beside[PATH_MAX], libexec[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n > 0) exe[n] = 0;
    char *slash = strrchr(exe, '/');
    if (slash) *slash = 0;
    snprintf(beside, sizeof beside, "%.4000s/template_helper.py", exe);
    snprintf(libexec, sizeof libexec, "%.4000s/../libexec/sluice/template_helper.py", exe);
    const char *try[] = {named,           getenv("SLUICE_TEMPLATE_HELPER"), beside, libexec, SL_HELPER_INSTALLED,
                         SL_HELPER_SOURCE};
    for (size_t i = 0; i < sizeof try / sizeof *try; i++) {
        if (!try[i] || !*try[i]) continue;
        if (!access(try[i], R_OK)) {
            snprintf(out, PATH_MAX, "%s", try[i]);
            return SL_OK;
        }
        if (i == 0) break; /* a path that was given is not guessed around */
    }
    return sl_err_set(err, SL_ECONFIG, "template_helper.py was not found (%s, %s); set SLUICE_TEMPLATE_HELPER",
                      named ? named : beside, named ? "as given" : libexec);
}

int sl_renderer_new(sl_renderer **out, const sl_template *t, const char *helper, sl_err *err) {
    sl_renderer *r = calloc(1, sizeof *r);
    if (!r) return sl_err_set(err, SL_ETEMP, "no memory for a template renderer");
    r->t = t;
    r->fd = -1;
    int rc = find_helper(r->helper, helper, err);
    if (rc)
        free(r);
    else
        *out = r;
    return rc;
}

/* Ends the helper with `sig`, if nothing has ended it before, and returns what did (waitpid). */
static int stop(sl_renderer *r, int sig) {
    int status = 0;
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
    if (r->pid > 0) {
        kill(r->pid, sig);
        while (waitpid(r->pid, &status, 0) < 0 && errno == EINTR) {}
    }
    r->pid = 0;
    return status;
}

void sl_renderer_free(sl_renderer *r) {
    if (!r) return;
    stop(r, SIGKILL);
    free(r);
}

uint64_t sl_renderer_restarts(const sl_renderer *r) {
    return r->starts ? r->starts - 1 : 0;
}

/* In the child, between fork and exec: only calls that are safe there. Its status says whether another try may do. */
static void cannot_become(int e) {
    _exit(sl_file_code(e) == SL_ETEMP ? CHILD_LATER : CHILD_NEVER);
}

static void become_helper(int sock, char *script, pid_t parent) {
    char *argv[] = {"python3", "-I", script, NULL};
    char *env[] = {"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", "PYTHONHASHSEED=0", "PYTHONDONTWRITEBYTECODE=1", NULL};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET)) {
    } /* where namespaces are not allowed, the process has no use for a network anyway */
    int null = open("/dev/null", O_RDWR);
    if (null < 0 || dup2(sock, 0) < 0 || dup2(sock, 1) < 0 || dup2(null, 2) < 0) cannot_become(errno);
    close_range(3, ~0u, 0);
    execve("/usr/bin/python3", argv, env);
    if (errno == ENOENT || errno == EACCES) execvpe("python3", argv, env);
    cannot_become(errno);
}

static int start(sl_renderer *r, sl_err *err) {
    int sv[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv))
        return sl_err_sys(err, SL_ETEMP, errno, "a socket pair for the template helper");
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) become_helper(sv[1], r->helper, parent);
    close(sv[1]);
    if (pid < 0) {
        close(sv[0]);
        return sl_err_sys(err, SL_ETEMP, errno, "starting the template helper");
    }
    r->pid = pid;
    r->fd = sv[0];
    r->starts++;
    return SL_OK;
}

static uint64_t cpu_ns(pid_t pid) {
    clockid_t c;
    struct timespec ts;
    if (clock_getcpuclockid(pid, &c) || clock_gettime(c, &ts)) return 0;
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

typedef struct deadline {
    uint64_t wall, cpu;
} deadline;

static deadline new_deadline(const sl_renderer *r) {
    return (deadline){sl_now_ns() + SL_TMPL_WALL_S * 1000000000ull, cpu_ns(r->pid) + SL_TMPL_CPU_S * 1000000000ull};
}

/* Wait until the helper's socket is ready; SL_EINTERNAL when the request has used its time up. Processor time
 * decides, so that a busy machine does not turn good rows away: a template has nothing to wait for but the processor,
 * and one that is not given any in all that time is no fault of the row. */
static int await(sl_renderer *r, short events, const deadline *d, sl_err *err) {
    for (;;) {
        struct pollfd p = {.fd = r->fd, .events = events};
        int n = poll(&p, 1, 500);
        if (n > 0) return SL_OK;
        if (n < 0 && errno != EINTR) return sl_err_sys(err, SL_ETEMP, errno, "waiting for the template helper");
        if (cpu_ns(r->pid) > d->cpu)
            return sl_err_set(err, SL_EINTERNAL, "the template used more than %d s of processor time on this row",
                              SL_TMPL_CPU_S);
        if (sl_now_ns() > d->wall)
            return sl_err_set(err, SL_ETEMP, "the template helper got less than %d s of processor time in %d s",
                              SL_TMPL_CPU_S, SL_TMPL_WALL_S);
    }
}

static int send_all(sl_renderer *r, const void *data, size_t n, const deadline *d, sl_err *err) {
    const char *p = data;
    while (n) {
        ssize_t w = send(r->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (w < 0 && (errno == EAGAIN || errno == EINTR)) {
            int rc = await(r, POLLOUT, d, err);
            if (rc) return rc;
            continue;
        }
        if (w < 0 && sl_file_code(errno) == SL_ETEMP)
            return sl_err_sys(err, SL_ETEMP, errno, "sending to the template helper");
        if (w < 0) return GONE;
        p += w;
        n -= (size_t)w;
    }
    return SL_OK;
}

static int recv_all(sl_renderer *r, void *data, size_t n, const deadline *d, sl_err *err) {
    char *p = data;
    while (n) {
        ssize_t g = recv(r->fd, p, n, MSG_DONTWAIT);
        if (g < 0 && (errno == EAGAIN || errno == EINTR)) {
            int rc = await(r, POLLIN, d, err);
            if (rc) return rc;
            continue;
        }
        if (g < 0 && sl_file_code(errno) == SL_ETEMP)
            return sl_err_sys(err, SL_ETEMP, errno, "listening to the template helper");
        if (g <= 0) return GONE;
        p += g;
        n -= (size_t)g;
    }
    return SL_OK;
}

static int send_json(sl_renderer *r, json_t *j, const deadline *d, sl_err *err) {
    char *s = json_dumps(j, JSON_COMPACT);
    if (!s) return sl_err_set(err, SL_ETEMP, "no memory for a request to the template helper");
    uint32_t n = (uint32_t)strlen(s);
    int rc = send_all(r, &n, 4, d, err);
    if (!rc) rc = send_all(r, s, n, d, err);
    free(s);
    return rc;
}

/* One frame, NUL-terminated. */
static int recv_frame(sl_renderer *r, char **out, size_t *len, const deadline *d, sl_err *err) {
    uint32_t n;
    int rc = recv_all(r, &n, 4, d, err);
    if (rc) return rc;
    if (n > SL_TMPL_MAX_TEXT) return sl_err_set(err, SL_EINTERNAL, "the template helper sent a frame of %u bytes", n);
    char *s = malloc((size_t)n + 1);
    if (!s) return sl_err_set(err, SL_ETEMP, "no memory for a rendered text of %u bytes", n);
    if ((rc = recv_all(r, s, n, d, err))) {
        free(s);
        return rc;
    }
    s[n] = 0;
    *out = s;
    *len = n;
    return SL_OK;
}

/* SL_EDATA: the helper answered {"error": ...}; it stays usable. */
static int recv_json(sl_renderer *r, json_t **out, const deadline *d, sl_err *err) {
    char *s = NULL;
    size_t n = 0;
    json_error_t je;
    int rc = recv_frame(r, &s, &n, d, err);
    if (rc || !s) return rc;
    *out = json_loadb(s, n, 0, &je);
    free(s);
    if (!*out && json_error_code(&je) == json_error_out_of_memory)
        return sl_err_set(err, SL_ETEMP, "no memory for an answer of the template helper");
    if (!*out) return sl_err_set(err, SL_EINTERNAL, "the template helper sent something that is not JSON");
    const char *e = json_string_value(json_object_get(*out, "error"));
    if (!e) return SL_OK;
    sl_err_set(err, SL_EDATA, "%s", e);
    json_decref(*out);
    *out = NULL;
    return SL_EDATA;
}

/* The helper says that it is there, with everything that it needs, before it has seen a template. */
static int greet(sl_renderer *r, sl_err *err) {
    deadline d = new_deadline(r);
    json_t *a = NULL;
    int rc = recv_json(r, &a, &d, err);
    json_decref(a);
    return rc;
}

static int hello(sl_renderer *r, sl_err *err) {
    deadline d = new_deadline(r);
    json_t *q = json_pack("{s:s, s:s?, s:O}", "source", r->t->source, "source_tools", r->t->source_tools, "vars",
                          r->t->vars),
           *a = NULL;
    int rc = q ? send_json(r, q, &d, err) : sl_err_set(err, SL_ETEMP, "no memory for the chat template");
    json_decref(q);
    if (!rc) rc = recv_json(r, &a, &d, err);
    if (!rc) r->tags = json_is_true(json_object_get(a, "tags"));
    json_decref(a);
    return rc;
}

static int take_text(sl_renderer *r, json_t *info, sl_rendered *out, const deadline *d, sl_err *err) {
    int rc = recv_frame(r, &out->text, &out->len, d, err);
    if (rc) return rc;
    out->has_tags = r->tags;
    json_t *spans = json_object_get(info, "spans"), *s;
    size_t n = json_array_size(spans), i, at = 0;
    if (!n) return SL_OK;
    if (!(out->spans = calloc(n, sizeof *out->spans))) return sl_err_set(err, SL_ETEMP, "no memory for %zu spans", n);
    json_array_foreach(spans, i, s) {
        json_int_t a = json_integer_value(json_array_get(s, 0)), b = json_integer_value(json_array_get(s, 1));
        if (a < (json_int_t)at || b < a || b > (json_int_t)out->len)
            return sl_err_set(err, SL_EINTERNAL, "the template helper sent spans out of order");
        out->spans[i][0] = (size_t)a;
        out->spans[i][1] = at = (size_t)b;
    }
    out->n_spans = n;
    return SL_OK;
}

static int exchange(sl_renderer *r, json_t *request, size_t n, sl_rendered *out, sl_err *err) {
    deadline d = new_deadline(r);
    json_t *a = NULL;
    int rc = send_json(r, request, &d, err);
    if (!rc) rc = recv_json(r, &a, &d, err);
    json_t *list = json_object_get(a, "out");
    if (!rc && json_array_size(list) != n)
        rc = sl_err_set(err, SL_EINTERNAL, "the template helper answered %zu of %zu jobs", json_array_size(list), n);
    for (size_t i = 0; !rc && i < n; i++) rc = take_text(r, json_array_get(list, i), &out[i], &d, err);
    json_decref(a);
    return rc;
}

/* NULL: no memory. */
static json_t *make_request(const sl_render_job *jobs, size_t n, json_t *tools, json_t *documents) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        if (json_array_append_new(list, json_pack("{s:O, s:b, s:O?}", "messages", jobs[i].messages, "gen",
                                                  (int)jobs[i].gen, "extra", jobs[i].extra))) {
            json_decref(list);
            return NULL;
        }
    return json_pack("{s:o, s:O?, s:O?}", "jobs", list, "tools", tools, "documents", documents);
}

/* The helper's end of the socket is closed. Before its greeting it knew no template and no row, so that something else
 * was in its way; later, whatever it did, it did on this row. Killed from outside it most likely was because memory ran
 * out everywhere (its own is limited, and running into that limit is an answer): that may pass. */
static int ended(sl_renderer *r, bool greeted, sl_err *err) {
    int status = stop(r, SIGABRT); /* (one that closed its socket and lives) */
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (!greeted && WIFEXITED(status) && WEXITSTATUS(status) == CHILD_NEVER)
        return sl_err_set(err, SL_EINTERNAL, "python3 cannot be started for the template helper: is it installed?");
    if (!greeted && WIFEXITED(status) && WEXITSTATUS(status) == CHILD_LATER)
        return sl_err_set(err, SL_ETEMP, "no memory, processes or open files for the template helper");
    if (!greeted || (killed && ++r->killed < MAX_KILLED))
        return sl_err_set(err, SL_ETEMP, "the template helper %s %s %d%s",
                          greeted ? "was ended by" : "did not start:", WIFSIGNALED(status) ? "signal" : "status",
                          WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
                          killed ? " (is memory short?)" : "");
    return sl_err_set(
        err, SL_EINTERNAL, "the template helper ended on this row (%s %d%s)", WIFSIGNALED(status) ? "signal" : "status",
        WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), killed ? ", and so did those before it" : "");
}

static int ensure_helper(sl_renderer *r, sl_err *err) {
    if (r->fd >= 0) return SL_OK;
    int rc = start(r, err);
    if (!rc && (rc = greet(r, err)) == GONE) rc = ended(r, false, err);
    if (!rc && (rc = hello(r, err)) == GONE) rc = ended(r, true, err);
    if (rc == SL_EDATA) r->broken = *err;
    if (rc) stop(r, SIGKILL);
    return rc;
}

sl_reason sl_render(sl_renderer *r, const sl_render_job *jobs, size_t n, json_t *tools, json_t *documents,
                    sl_rendered *out, sl_err *why) {
    memset(out, 0, n * sizeof *out);
    sl_err e = {0};
    if (r->broken.code) {
        if (why) *why = r->broken;
        return SL_R_TEMPLATE;
    }
    int rc = ensure_helper(r, &e);
    if (!rc) {
        json_t *q = make_request(jobs, n, tools, documents);
        rc =
            q ? exchange(r, q, n, out, &e) : sl_err_set(&e, SL_ETEMP, "no memory for a request to the template helper");
        json_decref(q);
        if (rc == GONE) rc = ended(r, true, &e);
    }
    if (rc != SL_ETEMP) r->killed = 0; /* the next one is another row */
    if (!rc) return SL_R_NONE;
    for (size_t i = 0; i < n; i++) sl_rendered_free(&out[i]);
    if (rc != SL_EDATA) stop(r, SIGKILL); /* out of step, hung or dead: the next row gets a new one */
    e.code = rc == SL_ETEMP ? SL_ETEMP : SL_EDATA;
    if (why) *why = e;
    return SL_R_TEMPLATE;
}
