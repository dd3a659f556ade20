/* wake: why there is no "waiting" flag. A publisher that rings only when it sees the waiter's flag, and a waiter that sleeps
 * only when it sees no news, under x86 store buffers of one entry each: without a full fence on both sides both look before
 * the other's store is visible, and the wake-up is lost. FENCE puts the fences in. ipc/ rings always (one write to an
 * eventfd, whose lock is the fence); the collective's futexes follow this model.
 *   Publisher: store cursor; [fence]; load waiting; if set, FUTEX_WAKE.
 *   Waiter:    store waiting = 1; [fence]; load cursor; if unchanged, FUTEX_WAIT(word).
 * The futex word is bumped by the waker, so a wake between check and wait is seen. Without FENCE the model must fail. */
byte cursor, waiting, word;
byte Pb_full, Pb_val;       /* publisher's buffered store to cursor   */
byte Wb_full, Wb_val;       /* waiter's buffered store to waiting     */
bool asleep, got;

proctype Pub() {
  Pb_val = 1; Pb_full = 1;                        /* cursor=1 (buffered)  */
#ifdef FENCE
  (Pb_full == 0);                                 /* seq_cst fence drains */
#endif
  if
  :: waiting == 1 -> atomic { word++; asleep = false }   /* FUTEX_WAKE    */
  :: else -> skip
  fi
}
proctype Wait() {
  byte w;
  w = word;
  Wb_val = 1; Wb_full = 1;                        /* waiting=1 (buffered) */
#ifdef FENCE
  (Wb_full == 0);
#endif
  if
  :: cursor == 1 -> got = true
  :: else ->
     atomic { if :: word == w -> asleep = true :: else -> skip fi };  /* FUTEX_WAIT */
     (asleep == false);
     (cursor == 1); got = true
  fi
}
proctype DrainP() { (Pb_full == 1); atomic { cursor  = Pb_val; Pb_full = 0 } }
proctype DrainW() { (Wb_full == 1); atomic { waiting = Wb_val; Wb_full = 0 } }
init { atomic { run Pub(); run Wait(); run DrainP(); run DrainW() } }
