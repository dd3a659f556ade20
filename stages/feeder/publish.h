/* publish: closed batches go from the packer into the batch rings, each to the group with the most room.
 *
 * At start, the batches that are in a ring between released and published are found there (they were published by an
 * earlier life of the feeder and will be worked on); batches whose rows are all in commit.log are skipped. The rings
 * are read first and commit.log after them: a batch that leaves a ring in between is in the log by then. */
#ifndef SL_FEEDER_PUBLISH_H
#define SL_FEEDER_PUBLISH_H
#include "ipc/boot.h"
#include "stages/feeder/intake.h"
#include "stages/feeder/packer.h"

typedef struct sl_publisher sl_publisher;
/* Attaches the batch rings as producer and notes what is in flight. Call before sl_intake_open. */
int sl_publisher_open(sl_publisher **out, const sl_boot *boot, sl_err *err);
/* Opens the packer of the store; call after sl_intake_open. */
int sl_publisher_begin(sl_publisher *p, const sl_intake *in, sl_err *err);
void sl_publisher_close(sl_publisher *p);
/* Publish what can be published. Number of batches, or SL_E*. */
int sl_publisher_turn(sl_publisher *p, sl_err *err);
bool sl_publisher_blocked(const sl_publisher *p);     /* a batch waits for room in the rings */
uint64_t sl_publisher_rows(const sl_publisher *p);    /* rows that left the packer, published or skipped */
uint64_t sl_publisher_batches(const sl_publisher *p); /* published in this life */
uint64_t sl_publisher_tokens(const sl_publisher *p);
/* Is there a group that has gathered everything it was given? */
bool sl_publisher_starved(const sl_publisher *p);
#endif
