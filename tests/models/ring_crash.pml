/* ring_crash: one staged ring of depth D (ipc/ring.h), three single-writer cursors (published by P, validated by G, released
 * by W), a durable commit log, and a crash of any stage between any two steps. A crash loses what is local to the process;
 * cursors, descriptors, verdicts (shared memory) and the commit log (disk) survive. The writer releases only after the
 * commit. A sample is one descriptor here; the source can replay.
 *
 * Mutations: BUG_RELEASE_FIRST releases before the commit (a crash between loses a sample); BUG_NO_DEDUPE commits without a
 * look at the log (a crash between commit and release stores a sample twice). */
#define D 2            /* ring depth            */
#define N 4            /* samples to move       */
#define CR 2           /* crashes allowed, each */

byte published, validated, released;   /* shm cursors                     */
byte desc[D];                          /* slot -> sample number + 1       */
byte verdict[D];                       /* written by G only               */
bool torn[D];                          /* payload being overwritten       */
byte committed[N];                     /* durable: times on disk          */
byte logend;                           /* durable: commit records         */

byte crP = CR, crG = CR, crW = CR;

#ifdef BUG_RELEASE_FIRST
#define REL_EARLY 1
#else
#define REL_EARLY 0
#endif

inline inv() {
  assert(released <= validated);
  assert(validated <= published);
  assert(published <= released + D)
}

proctype P() {
  byte s;
boot:
  s = published;                       /* resume from own cursor          */
  do
  :: s == N -> break
  :: s < N && s < released + D ->
       torn[s % D] = true;             /* DMA into the slot starts        */
       if :: crP > 0 -> crP--; goto boot :: skip fi;
       desc[s % D] = s + 1;
       torn[s % D] = false;            /* event complete                  */
       if :: crP > 0 -> crP--; goto boot :: skip fi;
       atomic { published = s + 1; inv() };   /* store-release            */
       if :: crP > 0 -> crP--; goto boot :: skip fi;
       s++
  od
}

proctype G() {
  byte s;
boot:
  s = validated;
  do
  :: s == N -> break
  :: s < published ->
       assert(!torn[s % D]);           /* never sees a half-written slot  */
       assert(desc[s % D] == s + 1);
       verdict[s % D] = desc[s % D];
       if :: crG > 0 -> crG--; goto boot :: skip fi;
       atomic { validated = s + 1; inv() };
       if :: crG > 0 -> crG--; goto boot :: skip fi;
       s++
  od
}

proctype W() {
  byte s, id;
boot:
  s = released;
  do
  :: s == N -> break
  :: s < validated ->
       assert(!torn[s % D]);
       assert(verdict[s % D] == s + 1);
       id = desc[s % D] - 1;
#ifdef BUG_RELEASE_FIRST
       atomic { released = s + 1; inv() };
       if :: crW > 0 -> crW--; goto boot :: skip fi;
       if :: id >= logend -> atomic { committed[id]++; logend = id + 1 } :: else fi;
#else
#ifdef BUG_NO_DEDUPE
       atomic { committed[id]++; logend = id + 1 };
#else
       if                              /* idempotent: the log decides     */
       :: id >= logend -> atomic { committed[id]++; logend = id + 1 }
       :: else
       fi;
#endif
       if :: crW > 0 -> crW--; goto boot :: skip fi;
       atomic { released = s + 1; inv() };
#endif
       if :: crW > 0 -> crW--; goto boot :: skip fi;
       s++
  od
}

proctype Check() {
  byte i;
  (released == N);
  i = 0;
  do
  :: i < N -> 
#ifndef BUG_RELEASE_FIRST
       assert(committed[i] == 1);
#endif
       i++
  :: else -> break
  od
}
ltl done   { <> (released == N) }
ltl once   { [] (committed[0] <= 1 && committed[1] <= 1 && committed[2] <= 1 && committed[3] <= 1) }
ltl nolost { <> (committed[0] == 1 && committed[1] == 1 && committed[2] == 1 && committed[3] == 1) }
init { atomic { run P(); run G(); run W(); run Check() } }
