/* sluice salvage: rebuild logs and indexes of a store from its shards. The work is in stages/writer/salvage.h. */
#include "tools/cli.h"
#include "tools/commands.h"
#include "stages/writer/salvage.h"
#include <inttypes.h>
#include <stdio.h>

static struct { bool json, yes; } o;

static const sl_cli_opt opts[] = {
    {"yes", 'y', SL_CLI_FLAG, NULL, "do it; without it nothing is changed and the plan is only said", &o.yes},
    {"json", 0, SL_CLI_FLAG, NULL, "print one JSON object instead of text", &o.json},
    {0}};

static const sl_cli cli = {"sluice salvage",
                           "STORE",
                           "rebuild a damaged store from its shards, keeping every whole row",
                           "Walks the shards of STORE frame by frame, keeps every row whose frames all match their "
                           "checksums, and rebuilds commit.log, "
                           "intake.log, the indexes and, if need be, the manifest around them. Bytes of rows that are "
                           "not whole are cleared; these rows are pending "
                           "again and the next run computes them. The old logs stay as *.damaged.\n\n"
                           "Drain the service first. 'sluice verify --deep' tells whether any of this is needed, and "
                           "afterwards that it worked.",
                           "sluice salvage --yes out",
                           opts,
                           1,
                           1};

int sl_cmd_salvage(int argc, char **argv) {
    int n = 0, rc = sl_cli_parse(&cli, argc, argv, &n);
    if (rc != SL_CLI_GO) return rc;
    sl_salvage_report r;
    sl_err err = {0};
    if (!o.yes) {
        fprintf(stderr,
                "salvage changes %s in place: indexes and logs are written anew and damaged rows are cleared. Run it "
                "with --yes.\n",
                argv[1]);
        return 2;
    }
    if (sl_store_salvage(argv[1], &r, &err)) return sl_cli_fail(&err);
    printf(o.json ? "{\"rows\":%" PRIu64 ",\"shards\":%" PRIu64 ",\"bytes_dropped\":%" PRIu64
                    ",\"recommitted\":%" PRIu64 ",\"pending_again\":%" PRIu64 ",\"rejects\":%" PRIu64
                    ",\"restored\":%" PRIu64 ",\"lost\":%" PRIu64 "}\n"
                  : "%" PRIu64 " whole rows in %" PRIu64 " shards kept, %" PRIu64 " damaged bytes cleared; %" PRIu64
                    " rows had no record, %" PRIu64 " are pending again, %" PRIu64 " rejects kept; intake: %" PRIu64
                    " rows restored, %" PRIu64 " lost\n",
           r.rows, r.shards, r.bytes_dropped, r.recommitted, r.pending_again, r.rejects, r.restored, r.lost);
    return r.lost ? 1 : 0;
}
