/* group: R tensor-parallel ranks read the same batch position and each writes its part of batch s into its own ring. Any rank
 * dies: the whole group is killed, the epoch is bumped, every rank rewinds to the batch ring's "gathered". Descriptors carry
 * (batch, epoch). Gather pops one descriptor a ring; older epochs are dropped first. (The same with several descriptors a
 * batch, the sample ring and the writer: gather.pml.)
 *
 * Mutation BUG_NO_EPOCH: gather goes by the batch alone and mixes two lives of a group. */
#define R 2
#define D 3
#define N 3
#define CR 2
byte epoch = 1;              /* shm, written by supervisor only          */
byte feed_done;              /* gather cursor on the feed ring           */
byte head[R], tail[R];       /* rank ring cursors (never rewound)        */
byte ds[9], de[9];           /* [r*D + slot] sample, epoch  (R*D <= 9)   */
bool run_[R]; bool kill_;
byte out[N];                 /* times handed to the writer               */
byte crashes = CR;

proctype Rank(byte r) {
  byte s, e;
boot:
end_boot:
  (run_[r]);
  e = epoch; s = feed_done;                 /* rewind point               */
  do
  :: kill_ -> run_[r] = false; goto boot
  :: !kill_ && s < N && head[r] < tail[r] + D ->
       atomic {                              /* publish is one store      */
         if :: kill_ -> skip
            :: else -> ds[r*D + head[r]%D] = s; de[r*D + head[r]%D] = e; head[r]++; s++
         fi }
  :: feed_done == N -> run_[r] = false; break
  od
}
proctype Sup() {
  byte i;
  do
  :: crashes > 0 && feed_done < N ->         /* some rank died             */
       crashes--; kill_ = true;
       (run_[0] == false && run_[1] == false);/* waitid on every pidfd      */
       epoch++; 
       atomic { kill_ = false; run_[0] = true; run_[1] = true }
  :: feed_done == N -> break
  od
}
proctype Gather() {
  byte a, b;
  do
  :: feed_done == N -> break
  :: feed_done < N && tail[0] < head[0] && tail[1] < head[1] ->
       a = tail[0] % D; b = D + tail[1] % D;
#ifdef BUG_NO_EPOCH
       if
       :: ds[a] == feed_done && ds[b] == feed_done -> atomic { assert(de[a] == de[b]); out[feed_done]++; tail[0]++; tail[1]++; feed_done++ }
       :: else -> atomic { if :: ds[a] != feed_done -> tail[0]++ :: else fi; if :: ds[b] != feed_done -> tail[1]++ :: else fi }
       fi
#else
       if                                     /* drop the older epoch first */
       :: de[a] < de[b] -> tail[0]++
       :: de[b] < de[a] -> tail[1]++
       :: de[a] == de[b] && ds[a] == feed_done && ds[b] == feed_done ->
            atomic { out[feed_done]++; tail[0]++; tail[1]++; feed_done++ }
       :: de[a] == de[b] && (ds[a] < feed_done || ds[b] < feed_done) ->
            atomic { if :: ds[a] < feed_done -> tail[0]++ :: else fi; if :: ds[b] < feed_done -> tail[1]++ :: else fi }
       :: de[a] == de[b] && (ds[a] > feed_done || ds[b] > feed_done) -> assert(false)
       fi
#endif
  od;
  assert(out[0]==1 && out[1]==1 && out[2]==1)
}
ltl done { <> (feed_done == N) }
init { atomic { run_[0]=true; run_[1]=true; run Rank(0); run Rank(1); run Sup(); run Gather() } }
