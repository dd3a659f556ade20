/* doorbell: one eventfd a stage (ipc/doorbell.h). The publisher stores its cursor (x86 store buffer, one entry), then calls
 * write(eventfd), a syscall that takes the eventfd's lock, so the buffer is drained first. The waiter drains the bell, THEN
 * tests the cursor, THEN polls (sleeps until the count is above 0). It may crash anywhere: the supervisor holds the
 * eventfd, so the count survives.
 *
 * Mutation BUG_TEST_THEN_DRAIN: the waiter tests first and drains after; a ring in between is eaten and it sleeps for ever. */
#define N 3

byte cursor, bell, seen;
byte sbuf, sfull; /* the publisher's store buffer */
byte cr = 2;

proctype Pub() {
    byte i = 0;
    do
    :: i < N ->
        i++; sbuf = i; sfull = 1;
        (sfull == 0); /* syscall entry: drained */
        bell++
    :: else -> break
    od
}

proctype DrainP() {
end_d:
    do
    :: sfull == 1 -> atomic { cursor = sbuf; sfull = 0 }
    od
}

proctype Waiter() {
boot:
    do
    :: seen == N -> break
    :: else ->
#ifdef BUG_TEST_THEN_DRAIN
        do :: seen < cursor -> seen++ :: else -> break od;
        bell = 0; /* too late: may eat a ring */
        if :: seen == N -> break :: else -> (bell > 0) fi
#else
        bell = 0;
        if :: cr > 0 -> cr--; goto boot :: skip fi;
        do :: seen < cursor -> seen++ :: else -> break od;
        if :: seen == N -> break :: else -> (bell > 0) fi
#endif
    od
}

init { atomic { run Pub(); run DrainP(); run Waiter() } }
