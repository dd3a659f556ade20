/* gather: one batch ring, R chunk rings, one sample ring; gather and writer crash anywhere, the group dies in the middle of
 * a batch. The order of steps is that of ipc/flow.h and stages/gather/gather.c:
 *
 *   gather   reads the group's epoch, then each ring up to the batch's END; all ENDs in: publish BATCH in the sample ring
 *            (one store), advance validated[r] one by one, advance gathered. Restart: is the batch at "gathered" already in
 *            the sample ring? Then only finish the cursors, else read again from validated[r].
 *   writer   reads validated[r] BEFORE it looks at the sample ring. Empty: what lies before validated[r] is of dead epochs,
 *            release it. Else, once gathered has passed the batch: find its chunks, commit, release chunk rings, batch
 *            ring, sample ring one by one. Restart: the commit log says what is done.
 *   ranks    start at the highest "gathered" that any of them saw, in the epoch of their start.
 *
 * Mutations, each of which must fail:
 *   BUG_SWEEP_LATE       validated is read after the look at the sample ring
 *   BUG_NO_GATE          the writer does not wait for gathered
 *   BUG_VALIDATED_FIRST  validated is advanced before the batch is published
 *   BUG_NO_RECOVER       a restarted gather does not look into the sample ring
 *   BUG_STALE_LATER      stale descriptors in front of a batch are passed only with the batch: a full ring never empties
 *   BUG_FLOOR_LOST       a restarted gather goes on with descriptors of a dead epoch, the first of which may be gone
 *   BUG_NO_EPOCH         gather takes descriptors of any epoch for the batch in hand */
#define R 2
#define D 4 /* chunk ring: twice the two descriptors of a batch */
#define SD 2
#define N 2

byte epoch = 1;                     /* ctl page, one writer: the supervisor */
byte pub[R], val[R], rel[R];        /* chunk rings */
byte db[8], de[8], dk[8];           /* [r*D + slot]: batch, epoch, kind 1 CHUNK 2 END */
byte gathered, batch_rel;           /* batch ring (all N batches are published) */
byte spub, srel, sb[SD], se[SD];    /* sample ring */
byte committed[N];                  /* the commit log */
bool run_ = true, agreed;
byte start, life[R], prog[R]; /* life: epoch, 0 not started; prog: next descriptor, 2 a batch; collectives keep ranks together */
#ifndef DEATHS /* the runner checks the pairs of what can go wrong; all three together are ten times the states */
#define DEATHS 1
#endif
#ifndef CRG
#define CRG 1
#endif
#ifndef CRW
#define CRW 0
#endif
byte deaths = DEATHS, crG = CRG, crW = CRW;

inline inv(r) {
    assert(rel[r] <= val[r] && val[r] <= pub[r] && pub[r] <= rel[r] + D)
}

/* Release up to `to`; what is out of use is zeroed, here and below, so that equal states look equal to the checker. */
inline release(r, to) {
    d_step {
        do
        :: rel[r] < to -> db[r * D + rel[r] % D] = 0; de[r * D + rel[r] % D] = 0; dk[r * D + rel[r] % D] = 0; rel[r]++
        :: else -> break
        od;
        inv(r)
    }
}

/* A rank has no state that survives it; the supervisor's kill takes both at once, wherever each of them was. */
proctype Rank(byte r) {
end_run:
    do
    :: atomic {
        run_ && life[r] == 0 ->
        if /* they agree where to start: where gathered is when one of them looks */
        :: agreed -> skip
        :: else -> start = gathered; agreed = true
        fi;
        life[r] = epoch; prog[r] = 2 * start + 1
    }
    :: atomic {
        run_ && life[r] > 0 && prog[r] <= 2 * N && pub[r] < rel[r] + D && prog[r] <= prog[1 - r] + 1 ->
        db[r * D + pub[r] % D] = (prog[r] - 1) / 2; de[r * D + pub[r] % D] = life[r];
        dk[r * D + pub[r] % D] = 1 + (prog[r] - 1) % 2;
        pub[r]++; prog[r]++; inv(r)
    }
    od
}

proctype Sup() {
end_sup:
    do
    :: deaths > 0 && gathered < N ->
        atomic {
            deaths--; run_ = false; agreed = false; start = 0;
            life[0] = 0; life[1] = 0; prog[0] = 0; prog[1] = 0
        }
        epoch++; /* every rank was reaped */
        run_ = true
    od
}

proctype Gather() {
    byte cur, ep, floor, E, r, p, i;
    byte at[R], own[R]; /* own: everything before is stale */
    bool done[R], started[R], found;
boot:
    skip;
    d_step {
        cur = gathered; ep = 0; floor = 0; found = false;
        at[0] = val[0]; at[1] = val[1]; own[0] = val[0]; own[1] = val[1];
        done[0] = false; done[1] = false; started[0] = false; started[1] = false;
        p = srel;
        do
        :: p < spub -> if :: sb[p % SD] == cur -> found = true; ep = se[p % SD] :: else fi; p++
        :: else -> break
        od;
        r = 0
    }
#ifndef BUG_NO_RECOVER
    if
    :: found ->
        do
        :: r < R ->
            d_step {
                p = val[r];
                do
                :: p < pub[r] -> if :: de[r * D + p % D] == ep && db[r * D + p % D] == cur -> at[r] = p + 1 :: else fi; p++
                :: else -> break
                od
            }
            val[r] = at[r]; r++;
            if :: crG > 0 -> crG--; goto boot :: skip fi
        :: else -> break
        od;
        gathered = cur + 1;
        goto boot
    :: else
    fi;
#endif
#ifdef BUG_FLOOR_LOST
    floor = 1;
#else
    floor = epoch; /* what was read of a dead epoch before the crash is not known any more */
#endif
    d_step { ep = 0; r = 0; p = 0; i = 0; E = 0; found = false }
end_loop:
    do
    :: cur < N && (!done[0] && at[0] < pub[0] || !done[1] && at[1] < pub[1] || ep > 0 && ep < epoch) ->
        E = epoch; /* before the cursors */
        r = 0;
        do
        :: r < R ->
            d_step { /* one ring as far as it goes; rings only grow, so this is as good as one descriptor at a time */
                do
                :: !done[r] && at[r] < pub[r] ->
                    i = r * D + at[r] % D;
                    if
#ifdef BUG_NO_EPOCH
                    :: db[i] < cur -> at[r]++; own[r] = at[r]
                    :: db[i] == cur -> if :: ep == 0 -> ep = de[i] :: else fi; started[r] = true; done[r] = (dk[i] == 2); at[r]++
                    :: else -> done[r] = true
#else
                    :: de[i] < (ep > 0 -> ep : floor) -> assert(!started[r]); at[r]++; own[r] = at[r]
                    :: ep > 0 && de[i] > ep -> /* the older epoch will not be completed: forget it */
                        floor = de[i]; ep = 0;
                        done[0] = false; done[1] = false; started[0] = false; started[1] = false; own[0] = at[0]; own[1] = at[1]
                    :: (ep == 0 && de[i] >= floor || de[i] == ep) && db[i] < cur -> assert(!started[r]); at[r]++; own[r] = at[r]
                    :: (ep == 0 && de[i] >= floor || de[i] == ep) && db[i] == cur ->
                        ep = de[i]; started[r] = true; done[r] = (dk[i] == 2); at[r]++
                    :: (ep == 0 && de[i] >= floor || de[i] == ep) && db[i] > cur -> assert(false)
#endif
                    fi
                :: else -> break
                od;
                r++
            }
        :: else -> break
        od;
        r = 0;
        if
        :: done[0] && done[1] ->
#ifdef BUG_VALIDATED_FIRST
            val[0] = at[0]; val[1] = at[1];
#endif
            (spub < srel + SD);
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            atomic { sb[spub % SD] = cur; se[spub % SD] = ep; spub++ }
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            atomic { val[0] = at[0]; inv(0) }
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            atomic { val[1] = at[1]; inv(1) }
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            gathered = cur + 1;
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            d_step { cur++; ep = 0; own[0] = at[0]; own[1] = at[1]; done[0] = false; done[1] = false; started[0] = false; started[1] = false }
        :: else ->
            d_step {
                if
                :: ep > 0 && ep < E ->
                    floor = E; ep = 0;
                    done[0] = false; done[1] = false; started[0] = false; started[1] = false; own[0] = at[0]; own[1] = at[1]
                :: else
                fi
            }
#ifdef BUG_STALE_LATER
            d_step {
                if :: !started[0] -> val[0] = own[0] :: else fi;
                if :: !started[1] -> val[1] = own[1] :: else fi
            }
#else
            atomic { val[0] = own[0]; inv(0) }
            if :: crG > 0 -> crG--; goto boot :: skip fi;
            atomic { val[1] = own[1]; inv(1) }
#endif
        fi;
        d_step { E = 0; r = 0; p = 0; i = 0 }
    od
}

/* Both descriptors of batch b, epoch e, in [rel, val) of ring r? p: behind its END. */
inline find(r, b, e, n, p) {
    d_step {
        n = 0; p = rel[r]; j = rel[r];
        do
        :: j < val[r] ->
            if
            :: db[r * D + j % D] == b && de[r * D + j % D] == e -> n++; p = j + 1
            :: else
            fi;
            j++
        :: else -> break
        od
    }
}

proctype Writer() {
    byte v[R], b, e, n, p, j;
boot:
    skip;
    d_step { v[0] = 0; v[1] = 0; b = 0; e = 0; n = 0; p = 0; j = 0 }
end_loop:
    do
    :: srel < spub || rel[0] < val[0] || rel[1] < val[1] ->
#ifndef BUG_SWEEP_LATE
        d_step { v[0] = val[0]; v[1] = val[1] }
#endif
        if
        :: srel == spub ->
#ifdef BUG_SWEEP_LATE
            d_step { v[0] = val[0]; v[1] = val[1] }
#endif
            release(0, v[0]);
            release(1, v[1])
        :: srel < spub ->
            b = sb[srel % SD]; e = se[srel % SD];
#ifndef BUG_NO_GATE
            (gathered > b);
#endif
            if
            :: committed[b] == 0 ->
                find(0, b, e, n, p); assert(n == 2); /* what is committed was there, of one epoch */
                find(1, b, e, n, p); assert(n == 2);
                committed[b]++
            :: else /* the log has it: a crash came between commit and release */
            fi;
            if :: crW > 0 -> crW--; goto boot :: skip fi;
            find(0, b, e, n, p); release(0, p);
            if :: crW > 0 -> crW--; goto boot :: skip fi;
            find(1, b, e, n, p); release(1, p);
            atomic { batch_rel = (batch_rel > b -> batch_rel : b + 1); assert(batch_rel <= gathered) }
            if :: crW > 0 -> crW--; goto boot :: skip fi;
            d_step { sb[srel % SD] = 0; se[srel % SD] = 0; srel++ }
        fi;
        d_step { v[0] = 0; v[1] = 0; b = 0; e = 0; n = 0; p = 0; j = 0 }
    od
}

/* When nothing moves any more, everything was committed (checked at every quiet end, which `timeout` names). */
proctype Check() {
    timeout;
    assert(committed[0] == 1 && committed[1] == 1 && gathered == N && srel == spub)
}

init {
    atomic { run Rank(0); run Rank(1); run Sup(); run Gather(); run Writer(); run Check() }
}
