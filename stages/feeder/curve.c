#include "stages/feeder/curve.h"
#include "ipc/file.h"
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zmq.h>

enum { KEY_CHARS = 40, KEY_BYTES = 32, MAX_CLIENTS = 4096 };

struct sl_curve {
    void *zap, *ctx;
    pthread_t thread;
    bool running;
    unsigned char (*allowed)[KEY_BYTES];
    unsigned n;
};

static bool admitted(const sl_curve *c, const unsigned char key[KEY_BYTES]) {
    for (unsigned i = 0; i < c->n; i++)
        if (!memcmp(c->allowed[i], key, KEY_BYTES)) return true;
    return false;
}

/* One ZAP request: version, request id, domain, address, identity, mechanism, credentials. False: stop. */
static bool answer(sl_curve *c) {
    char frame[7][256];
    int len[7] = {0}, n = 0, more = 1;
    while (more) {
        char spill[256];
        int r = zmq_recv(c->zap, n < 7 ? frame[n] : spill, 256, 0);
        if (r < 0) return false;
        if (n < 7) len[n] = r < 256 ? r : 256;
        n++;
        size_t sz = sizeof more;
        if (zmq_getsockopt(c->zap, ZMQ_RCVMORE, &more, &sz)) return false;
    }
    if (n == 1 && len[0] == 4 && !memcmp(frame[0], "STOP", 4)) return false;
    bool ok = n == 7 && len[5] == 5 && !memcmp(frame[5], "CURVE", 5) && len[6] == KEY_BYTES &&
              admitted(c, (const unsigned char *)frame[6]);
    if (n < 2) return true;
    zmq_send(c->zap, "1.0", 3, ZMQ_SNDMORE);
    zmq_send(c->zap, frame[1], (size_t)len[1], ZMQ_SNDMORE);
    zmq_send(c->zap, ok ? "200" : "400", 3, ZMQ_SNDMORE);
    zmq_send(c->zap, ok ? "OK" : "key not listed", ok ? 2 : 14, ZMQ_SNDMORE);
    zmq_send(c->zap, "", 0, ZMQ_SNDMORE);
    zmq_send(c->zap, "", 0, 0);
    return true;
}

static void *serve(void *arg) {
    while (answer(arg)) {}
    return NULL;
}

static int read_secret(const char *dir, char key[KEY_CHARS + 1], sl_err *err) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/server.secret", dir);
    struct stat st;
    FILE *f = fopen(path, "re");
    if (!f || fstat(fileno(f), &st)) {
        int e = errno;
        if (f) fclose(f);
        return sl_err_sys(err, SL_ECONFIG, e, "CURVE secret key %s (make a pair with `sluice_client.py keygen DIR`)",
                          path);
    }
    size_t n = fread(key, 1, KEY_CHARS, f);
    fclose(f);
    key[n] = 0;
    if (st.st_mode & 077)
        return sl_err_set(err, SL_ECONFIG, "%s has mode %o: others may read the secret key, expected 600", path,
                          st.st_mode & 07777);
    uint8_t raw[KEY_BYTES];
    if (n != KEY_CHARS || !zmq_z85_decode(raw, key))
        return sl_err_set(err, SL_ECONFIG, "%s: expected a Z85 key of 40 characters", path);
    return SL_OK;
}

static int read_clients(sl_curve *c, const char *dir, sl_err *err) {
    char path[PATH_MAX], line[256];
    snprintf(path, sizeof path, "%s/clients.pub", dir);
    FILE *f = fopen(path, "re");
    if (!f) return sl_err_sys(err, sl_file_read_code(errno), errno, "list of admitted clients %s", path);
    c->allowed = calloc(MAX_CLIENTS, KEY_BYTES);
    int rc = c->allowed ? SL_OK : sl_err_set(err, SL_ETEMP, "no memory for client keys");
    for (unsigned no = 1; !rc && fgets(line, sizeof line, f); no++) {
        uint8_t raw[KEY_BYTES];
        line[strcspn(line, " \t\r\n")] = 0;
        // '#' is also a letter of Z85: a key may hold it, or begin with it, and is told from a comment by being a key.
        int key = strlen(line) == KEY_CHARS && zmq_z85_decode(raw, line);
        if (!*line || (*line == '#' && !key)) continue;
        if (c->n == MAX_CLIENTS)
            rc = sl_err_set(err, SL_ECONFIG, "%s: more than %d keys", path, MAX_CLIENTS);
        else if (key)
            memcpy(c->allowed[c->n++], raw, KEY_BYTES);
        else
            rc = sl_err_set(err, SL_ECONFIG, "%s line %u: expected a Z85 public key of 40 characters", path, no);
    }
    fclose(f);
    if (!rc && !c->n) rc = sl_err_set(err, SL_ECONFIG, "%s admits nobody: list one public key a line", path);
    return rc;
}

int sl_curve_open(sl_curve **out, void *ctx, void *sock, const char *dir, sl_err *err) {
    char secret[KEY_CHARS + 1];
    int rc = read_secret(dir, secret, err), one = 1;
    if (rc) return rc;
    sl_curve *c = calloc(1, sizeof *c);
    if (!c) return sl_err_set(err, SL_ETEMP, "no memory for CURVE keys");
    c->ctx = ctx;
    rc = read_clients(c, dir, err);
    if (!rc && (!(c->zap = zmq_socket(ctx, ZMQ_REP)) || zmq_bind(c->zap, "inproc://zeromq.zap.01") ||
                zmq_setsockopt(sock, ZMQ_CURVE_SERVER, &one, sizeof one) ||
                zmq_setsockopt(sock, ZMQ_CURVE_SECRETKEY, secret, KEY_CHARS + 1) ||
                zmq_setsockopt(sock, ZMQ_ZAP_DOMAIN, "sluice", 6)))
        rc = sl_err_set(err, SL_ECONFIG, "setting up CURVE: %s", zmq_strerror(errno));
    memset(secret, 0, sizeof secret);
    if (!rc && pthread_create(&c->thread, NULL, serve, c))
        rc = sl_err_set(err, SL_ETEMP, "starting the authentication thread");
    else if (!rc)
        c->running = true;
    if (rc)
        sl_curve_close(c);
    else
        *out = c;
    return rc;
}

void sl_curve_close(sl_curve *c) {
    if (!c) return;
    if (c->running) {
        void *s = zmq_socket(c->ctx, ZMQ_REQ);
        if (s && !zmq_connect(s, "inproc://zeromq.zap.01")) zmq_send(s, "STOP", 4, 0);
        pthread_join(c->thread, NULL);
        if (s) {
            int zero = 0;
            zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof zero);
            zmq_close(s);
        }
    }
    if (c->zap) {
        int zero = 0;
        zmq_setsockopt(c->zap, ZMQ_LINGER, &zero, sizeof zero);
        zmq_close(c->zap);
    }
    free(c->allowed);
    free(c);
}
