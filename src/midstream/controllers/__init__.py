"""Controllers: pure policies that look at a running job and propose operations, and the arbiter that decides between
them.

====================== ===================================================================
module                 holds
====================== ===================================================================
``situation``          what a controller sees
``controller``         what a controller is, and what it proposes
``subjects``           what a proposal touches, and in which direction
``arbiter``            which proposals are made, and why the others are not
``proposal_records``   what is kept of each proposal
``auto_scale``         as many partitions and executors as the load needs
``balance``            no partition that has much more work than the others
``pace``               most throughput within a latency
``migrate``            a migration at a quiet moment
``share``              a budget of cores or rows per epoch that several jobs share
====================== ===================================================================
"""
